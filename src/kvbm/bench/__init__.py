"""Measure kvbm on this machine, against a memcpy of the same bytes and against other libraries: ``kvbm bench``.

Only the command line, and the tuner for its clock, import this package.
"""
