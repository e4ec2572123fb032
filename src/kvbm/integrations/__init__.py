"""Engines that run with kvbm: each module here imports its engine, and nothing else of kvbm imports them."""
