"""Engines that run with kvbm: each module here imports its engine, and nothing else of kvbm imports them.

Begin in the engine's folder; `host_store` copies blocks between an engine and host memory for all of them.
"""
