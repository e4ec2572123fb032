"""Measure kvbm on this machine, against a memcpy of the same bytes and against other libraries: ``kvbm bench``.

Nothing else in kvbm imports this package.
"""
