#!/usr/bin/env bash
# Builds wheel and sdist into dist/, checks them, and tries the wheel.
#
#   bash scripts/package.sh            needs a package index; a minute
#   bash scripts/package.sh --check    builds and checks, in a temporary folder; seconds
#
# It also writes dist/sbom.cdx.json: the software bill of materials (CycloneDX) of requirements.lock.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source scripts/tools.sh build twine check-wheel-contents cyclonedx-bom

work=$(mktemp -d)
# From what git has: a file that lies about here is in no package.
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory "$work/tree"
"$tools/python" -m build --outdir "$work/dist" "$work/tree" >"$work/log" 2>&1 || { tail -n 40 "$work/log"; exit 1; }
"$tools/twine" check --strict "$work"/dist/*
"$tools/check-wheel-contents" "$work"/dist/*.whl

# All that the package has is in the wheel, and nothing else: modules, recipes, the page, lists.
git ls-files --cached --others --exclude-standard -- __init__.py cli configs crypto node protocol |
    sed 's,^,primerl/,' | sort >"$work/wanted"
"$tools/python" -m zipfile --list "$work"/dist/*.whl | awk '$1 ~ "^primerl/" {print $1}' | sort >"$work/packed"
diff -u "$work/wanted" "$work/packed" || { echo "the wheel lacks or adds these" >&2; exit 1; }
[[ ${1:-} != --check ]] || exit 0

"$tools/cyclonedx-py" requirements requirements.lock --pyproject pyproject.toml --mc-type application \
    --output-reproducible --output-file "$work/dist/sbom.cdx.json"
# What is in the package itself, and in no requirement: the page's charts.
"$tools/python" - "$work/dist/sbom.cdx.json" <<'END'
import json, pathlib, re, sys
path, version = pathlib.Path(sys.argv[1]), re.search(r"\(v([\d.]+)\)", open("node/ops/page/uplot.js").readline())[1]
bom, purl = json.loads(path.read_text()), f"pkg:npm/uplot@{version}"
bom["components"].append({"type": "library", "name": "uplot", "version": version, "purl": purl, "bom-ref": purl,
                          "licenses": [{"license": {"id": "MIT"}}]})
path.write_text(json.dumps(bom, indent=2, sort_keys=True))
END

# The wheel alone, with its requirements as the lock has them.
"${PYTHON:-python3}" -m venv "$work/venv"
sed -n 's/^\([a-z0-9].*==[^\\]*\).*/\1/p' requirements.lock >"$work/constraints.txt" # without hashes
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$work/constraints.txt" "$work"/dist/*.whl
cd "$work" # not the repository, which would be imported
"$work/venv/bin/primerl-node" --version
"$work/venv/bin/primerl-node" --help | head -n 3
missing=$("$work/venv/bin/primerl-node" train @ demo --dry-run 2>&1 || true) # a recipe of the wheel, without [run]
grep "pip install 'primerl-node\[run\]'" <<<"$missing"
mkdir -p "$root/dist"
cp "$work"/dist/* "$root/dist/"
ls -l "$root/dist"
