"""Saves a table again and again, 60 times at least, until its input ends.

    save_tables.py N GPU DRIVER

The table has 500 * N rows, and its date is N.
"""

import sys
import threading

from kvbm.copy import cost_model

n, machine = int(sys.argv[1]), sys.argv[2:]
rows = tuple(cost_model.Row("d2h", "direct", 1, 1, n + i, 1e-4) for i in range(500 * n))
asked = threading.Thread(target=sys.stdin.read, daemon=True)
asked.start()
saved = 0
while saved < 60 or asked.is_alive():
    cost_model.save(cost_model.Table(*machine, str(n), "0", rows))
    saved += 1
