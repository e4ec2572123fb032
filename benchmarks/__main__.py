"""``python -m benchmarks NAME``: one of the studies."""

from kvbm.cli.click_classes import Group

#: Commands.  Each is a click command in the module of the same name.
STUDIES = (
    "auto", "cast", "digest", "duplex", "growth", "guard", "interference", "link", "offload", "operator-overhead", "overhead",
    "plot", "reshard", "scale", "targets", "tier", "timing-loop",
)  # fmt: skip

main = Group(
    lazy={name: f"benchmarks.{name.replace('-', '_')}" for name in STUDIES},
    help="Measure one part of kvbm, and compare it with other ways to do the same. See benchmarks/README.md.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
