"""Layouts, plans and reshardings in words, numbers and pictures: for terminals, files, notebooks and JSON."""
