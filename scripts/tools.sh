# Sourced with the names of release tools: installs them into .venv-tools once, and sets `tools` to its programs.
# Pinned, so that a renewed lock or a check differs by its input alone.
declare -A pinned=(
    [build]=1.6.1 [twine]=7.0.0 [check-wheel-contents]=0.6.3 [uv]=0.13.9 [cyclonedx-bom]=7.5.0
)
tools=$root/.venv-tools/bin
wanted=()
for name in "$@"; do wanted+=("$name==${pinned[$name]}"); done
[[ -x $tools/python ]] || "${PYTHON:-python3}" -m venv "$root/.venv-tools"
stamp=$root/.venv-tools/.installed-$(IFS=-; echo "${wanted[*]}")
if [[ ! -f $stamp ]]; then
    "$tools/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
    touch "$stamp"
fi
