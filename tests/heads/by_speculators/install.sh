#!/usr/bin/env bash
# Makes build/speculators, an environment for a project that trains heads. That project's code needs
# an older transformers than Outrider's tests do. All else, torch too, comes from the environment
# that `make` has installed. If build/speculators already has the packages of requirements.txt,
# nothing is done.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/../../.."
into=build/speculators
list=tests/heads/by_speculators/requirements.txt
cmp -s "$list" "$into/installed" && exit
"${PYTHON:-python3}" -m venv --clear "$into"
quietly() { "$into/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages "$PWD/.venv")')" >"$(packages "$into")/zz_tests.pth"
quietly install -c constraints.txt -r "$list"
# Heads need no packages for images and sound.
quietly uninstall --yes torchvision torchaudio
cp "$list" "$into/installed"
