"""Prints the names of the files that codegen makes for some layouts, and a hash of each."""

import hashlib
import json
import sys

import kvbm
from kvbm.compile import codegen

files = codegen.generate([kvbm.load(name) for name in sys.argv[1:]])
print(json.dumps([list(files), {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}]))
