"""Programs that tests run in processes of their own: start them with `tests/helpers/processes.py`."""
