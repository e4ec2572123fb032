"""Layouts, plans and reshardings in words, numbers and pictures: for terminals, files, notebooks and JSON.

Begin with `figure`, which draws a layout, and `facts`, which has the numbers of all pictures and texts.
"""
