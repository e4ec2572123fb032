"""Saves a table again and again.

    save_tables.py N GPU DRIVER

The table has 500 * N rows, and its date is N.
"""

import sys

from kvbm import tuning

n, machine = int(sys.argv[1]), sys.argv[2:]
rows = tuple(tuning.Row("d2h", "direct", 1, 1, n + i, 1e-4) for i in range(500 * n))
for _ in range(60):
    tuning.save(tuning.Table(*machine, str(n), "0", rows))
