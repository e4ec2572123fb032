"""Inside engines: each integration is a module of its own, which imports its engine."""
