"""``python -m kvbm`` is ``kvbm``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line.  Ctrl-C ends it without a traceback, also while it is imported and after it has ended."""
    # Not where it is ignored, as under nohup.
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.app import main as command

    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(prog_name="kvbm")
    finally:
        if is_handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
