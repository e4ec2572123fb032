"""What kvbm needs of the machine around it: folders for files between runs, locks, the machine's name and caches."""
