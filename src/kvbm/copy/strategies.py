"""The names of strategies: how a transfer may copy.  `kvbm.Transfer` documents them.

A strategy is a number in ``cuda/kvbm.h`` (``KVBM_DIRECT`` …), a way to run in ``cuda/transfer.cpp``, a name here and in
``core/routes.pxi``, launches in `executor`, and costs in `cost_model`.
"""

from typing import Literal, get_args

Strategy = Literal["auto", "aside", "direct", "staged", "engine"]

#: Strategies that choose per batch, by the measured table; and what they choose from, by their numbers in ``cuda/kvbm.h``.
CHOICES: tuple[str, ...] = get_args(Strategy)[:2]
STRATEGIES: tuple[str, ...] = get_args(Strategy)[2:]
