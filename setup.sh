#!/bin/sh
# Installs the workbench into the Python given first, with the extras given second: ./setup.sh .venv/bin/python test
# Where no NVIDIA GPU is found, torch comes as the much smaller CPU build from PyTorch's own index if that answers.
set -eu
cd "$(dirname "$0")"
python=$1
extras=${2:-}
torch=$(grep '^torch==' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or newer is needed; this is $("$python" --version). Try: make PYTHON=python3.12 ..." >&2
    exit 1
fi

answers() {
    "$python" -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=5).read(1)" 2>/dev/null
}

if "$python" -c "from importlib.metadata import version; assert version('torch').split('+')[0] == '${torch#torch==}'" 2>/dev/null; then
    echo "torch: ${torch#torch==} is already here"
elif nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "torch: found an NVIDIA GPU; taking the build of the configured package index"
    "$python" -m pip install --quiet "$torch"
elif answers; then
    echo "torch: no NVIDIA GPU found; taking the CPU build from $cpu_index"
    "$python" -m pip install --quiet --index-url "$cpu_index" "$torch"
else
    echo "torch: no NVIDIA GPU found, but $cpu_index does not answer; taking the build of the configured package index"
    "$python" -m pip install --quiet "$torch"
fi

echo "installing the workbench${extras:+ with its extras: $extras}"
"$python" -m pip install --quiet --constraint constraints.txt --editable ".${extras:+[$extras]}"
case $extras in
*test* | *dev*)
    # beside timm's optimizers ours are checked; they need torch alone, and the torchvision that timm as a whole asks
    # for does not fit every build of torch
    "$python" -m pip install --quiet --no-deps "$(grep '^timm==' constraints.txt)"
    ;;
esac
