#!/bin/sh
# Make a venv hold exactly the pins of the layers named: sh requirements/venv.sh trainer dev arithmetic
# VENV names it; unset, it is .venv.
#
# A layer is requirements/LAYER.txt; "LAYER?" leaves it out, and says so, where this machine cannot build it.
# Its pins.LAYER is written once the layer is installed whole: it holds the pins and the Python they were installed
# for. A venv with a record that no longer agrees, or with none, is made again from nothing.
# PYTHON names the interpreter; unset, the first of python3, python3.13, python3.12, python3.11 that is 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

fail() {
    echo "$*" >&2
    exit 1
}

version_of() { # of interpreter $1, as "3.12"; nothing where it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        case $(version_of "$candidate") in
            3.11 | 3.12 | 3.13)
                echo "$candidate"
                return
                ;;
        esac
    done
}

refuse_python() {
    first=${PYTHON:-python3}
    found=$(version_of "$first")
    echo "rl_jax needs Python 3.11, 3.12 or 3.13 with venv; $first is ${found:-not there}. Install it with" >&2
    for minor in 13 12 11; do
        if apt-cache show "python3.$minor-venv" >/dev/null 2>&1; then
            fail "    sudo apt-get install -y python3.$minor-venv"
        fi
    done
    fail "    sudo apt-get install -y python3-venv
or, where that is older than 3.11 or newer than 3.13, name one: make demo PYTHON=/path/to/python3.12"
}

can_compile() {
    command -v gcc >/dev/null &&
        "$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}

lacks_for() { # what this machine lacks to install layer $1; nothing where it can
    case $1 in
        arithmetic)
            can_compile || echo "requirements/arithmetic.txt has a package that is compiled; install what that needs with
    sudo apt-get install -y gcc python$(version_of "$python")-dev"
            ;;
        compilers | triton)
            [ "$(uname -sm)" = "Linux x86_64" ] ||
                echo "requirements/$1.txt has packages that are built for Linux on x86-64 only"
            ;;
    esac
}

expected_record() { # what pins.$1 must hold
    echo "$made_with"
    cat "requirements/$1.txt"
}

is_outdated() { # a layer was installed whole from other pins or for another Python
    for record in "$venv"/pins.*; do
        layer=${record#"$venv"/pins.}
        if [ ! -e "requirements/$layer.txt" ] || ! expected_record "$layer" | cmp -s - "$record"; then
            return 0
        fi
    done
    return 1
}

python=$(find_python)
[ -n "$python" ] || refuse_python
made_with=$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')

if [ ! -e "$venv/pins.trainer" ] || is_outdated; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments. Install what it lacks with
    sudo apt-get install -y python$(version_of "$python")-venv"
    echo "making $venv with Python $made_with"
    rm -f "$venv"/pins.* # first: an interrupt must leave no record beside half of a venv
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

for wanted in "$@"; do
    layer=${wanted%\?}
    [ ! -e "$venv/pins.$layer" ] || continue
    advice=$(lacks_for "$layer")
    if [ -n "$advice" ]; then
        [ "$wanted" != "$layer" ] || fail "$advice"
        echo "left out, and its tests are skipped: $advice"
        continue
    fi
    echo "installing requirements/$layer.txt into $venv (a minute or more)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "requirements/$layer.txt"
    expected_record "$layer" >"$venv/unfinished"
    mv "$venv/unfinished" "$venv/pins.$layer"
done
