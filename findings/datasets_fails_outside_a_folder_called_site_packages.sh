#!/usr/bin/env bash
# datasets 5.2.0 with dill 0.4.1 and pyarrow 26.0.1: installed into any folder (`pip install --target libs`, as is usual
# for containers, functions and machines without a package index), datasets imports, but no Dataset can be made from a list:
# PicklingError: Can't pickle <class 'MonthDayNano'>. The same files in a folder that is called site-packages work.
#
# A new Dataset is fingerprinted by pickling its table with dill. dill pickles a module by reference if its path begins
# with Python's prefix or contains the text "site-packages", and else by value, with all that it holds: of pyarrow that
# is a type without a module of its own, which cannot be pickled. A warning about dill, MonthDayNano or pickling is all that
# one sees; no line of it mentions folders.
#
# One would guess otherwise: Python finds modules by sys.path, whatever its folders are called, and making a Dataset from
# plain lists and strings involves neither functions nor modules of one's own.
#
# Output, 2026-11-30, CPython 3.11.7, x86_64 (seen with 3.12.3, too):
#
#     in libs:           PicklingError: Can't pickle <class 'MonthDayNano'>: it's not found as builtins.MonthDayNano
#     in site-packages:  1 row
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --target libs "datasets==5.2.0" "dill==0.4.1" "pyarrow==26.0.1"

cat > make.py <<'PYTHON'
import warnings

warnings.simplefilter("ignore")
from datasets import Dataset

try:
    made = Dataset.from_list([{"question": "2 + 2", "answer": "4"}])
    print(f"{made.num_rows} row")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
PYTHON

elsewhere=$(PYTHONPATH="$folder/libs" env/bin/python make.py)
ln -s libs site-packages
called=$(PYTHONPATH="$folder/site-packages" env/bin/python make.py)
echo "in libs:           $elsewhere"
echo "in site-packages:  $called"
[[ $elsewhere == "PicklingError: Can't pickle <class 'MonthDayNano'>"* && $called == "1 row" ]] || {
    echo "that has changed" >&2
    exit 1
}
