#!/bin/sh
# Makes the project's own environment, .venv, from requirements.txt; silent and instant where it is up to date.
#
#   sh scripts/bootstrap.sh
#
# The interpreter is the first fitting one found on PATH or where installers keep them off PATH; NHA_PYTHON=/path/to/python
# names one instead. The environment counts as made only once its stamp, a copy of requirements.txt, is written, so a set-up
# that was cut off starts again, and one whose requirements changed is made anew. Until the new one is complete the old one
# is kept beside it and put back where the new one fails.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX

environment=.venv
previous=.venv.previous
log=.venv.log
stamp=installed-requirements.txt

say() { printf 'set-up: %s\n' "$1" >&2; }

# Whether $1 is complete, made from today's requirements.txt, and its interpreter still there with its packages.
up_to_date() {
    cmp -s requirements.txt "$1/$stamp" &&
        "$1/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("pip") is None)' 2>/dev/null
}

# Removes environment $1; its stamp goes first, so that one cut off half-way is not taken for complete.
discard() {
    rm -f "$1/$stamp"
    rm -rf "$1"
}

fail() {
    if [ -d "$previous" ]; then
        discard "$environment"
        mv "$previous" "$environment"
    fi
    say "$1"
    exit 1
}

# Folders that may hold an interpreter, one a line: PATH first, then where installers put them off PATH.
folders() {
    printf '%s\n' "$PATH" | tr ':' '\n'
    home=${HOME:-/root}
    for folder in \
        /usr/local/bin /usr/bin /opt/homebrew/bin \
        "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin \
        "${UV_PYTHON_INSTALL_DIR:-$home/.local/share/uv/python}"/*/bin \
        "$home"/.local/bin "$home"/.local/share/mise/installs/python/*/bin "$home"/.asdf/installs/python/*/bin \
        "$home"/*conda3/bin "$home"/*forge*/bin "$home"/*conda3/envs/*/bin "$home"/*forge*/envs/*/bin \
        /opt/*conda*/bin /opt/*forge*/bin /opt/*conda*/envs/*/bin /opt/*forge*/envs/*/bin \
        /opt/python*/bin /opt/python/*/bin /usr/local/python*/bin /usr/local/opt/python@3*/bin \
        /opt/homebrew/opt/python@3*/bin /opt/hostedtoolcache/Python/*/x64/bin \
        /Library/Frameworks/Python.framework/Versions/*/bin
    do
        if [ -d "$folder" ]; then printf '%s\n' "$folder"; fi
    done
}

# The status is 0 for an interpreter that fits, 3 for one that fits but cannot make an environment with pip in it, else
# another. It is run to find out: a version manager's shim may exist and still start nothing.
examine() {
    "$1" -I -c '
import sys, sysconfig
fits = (3, 12) <= sys.version_info[:2] <= (3, 14) and sys.implementation.name == "cpython"
if not fits or sys.maxsize < 2**32 or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
try:
    import ensurepip, ssl, venv, zlib
except ImportError:
    sys.exit(3)' </dev/null >/dev/null 2>&1
}

# Sets `python` to the first interpreter that fits, `crippled` to the first that fits but cannot make an environment.
find_python() {
    python='' crippled=''
    if [ -n "${NHA_PYTHON:-}" ]; then
        candidates=$NHA_PYTHON
    else
        candidates=$(folders | while IFS= read -r folder; do
            for name in python3.12 python3.13 python3.14 python3 python; do
                if [ -x "$folder/$name" ]; then printf '%s\n' "$folder/$name"; fi
            done
        done)
    fi
    set -f
    IFS='
'
    for candidate in $candidates; do
        status=0
        examine "$candidate" || status=$?
        case $status in
            0) python=$candidate && break ;;
            3) crippled=${crippled:-$candidate} ;;
        esac
    done
    unset IFS
    set +f
}

explain_no_python() {
    if [ -n "$crippled" ]; then
        fail "$crippled cannot make a virtual environment because its venv, ensurepip or ssl module is missing; install them (on Debian and Ubuntu: the python3-venv package of that version)"
    elif [ -n "${NHA_PYTHON:-}" ]; then
        fail "NHA_PYTHON=$NHA_PYTHON does not start a CPython 3.12, 3.13 or 3.14, which this project needs"
    else
        found=$(python3 -c 'import platform; print("python3 is " + platform.python_version())' 2>/dev/null) || found='there is no python3'
        fail "CPython 3.12, 3.13 or 3.14 is needed and none was found ($found); install one, or name one with NHA_PYTHON=/path/to/python"
    fi
}

explain_failed_install() {
    if grep -qiE 'NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|ReadTimeout|ProxyError|unreachable|Connection refused' "$log"; then
        fail "the packages of requirements.txt could not be downloaded because no package index can be reached; connect to the network and run the same command again (pip's words: $log)"
    fi
    grep -iE 'error|no space' "$log" | head -n 10 >&2 || tail -n 10 "$log" >&2
    fail "pip could not install requirements.txt (above; all of it in $log)"
}

up_to_date "$environment" && exit 0

# One set-up at a time. The lock is this file's own, and the kernel drops it when the last process of the set-up has ended.
if command -v flock >/dev/null 2>&1; then
    exec 9<scripts/bootstrap.sh
    if ! flock -n 9; then
        say 'waiting for another set-up of this folder to end'
        flock 9
    fi
fi
if up_to_date "$environment"; then
    discard "$previous"
    exit 0
fi
if [ -d "$previous" ]; then # a replacement was cut off
    discard "$environment"
    mv "$previous" "$environment"
    up_to_date "$environment" && exit 0
fi
find_python
[ -n "$python" ] || explain_no_python

trap 'fail "interrupted; the same command starts it again"' HUP INT TERM
say "installing requirements.txt into $environment with $("$python" -c 'import platform, sys; print("Python", platform.python_version(), "from", sys.prefix)'), once, which takes a minute or two"
if [ -f "$environment/$stamp" ]; then
    mv "$environment" "$previous"
else
    rm -rf "$environment"
fi
"$python" -m venv "$environment" >"$log" 2>&1 || fail "$python could not make a virtual environment: $(tail -n 1 "$log")"
PIP_USER=0 "$environment/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --retries 2 \
    --requirement requirements.txt >"$log" 2>&1 </dev/null || explain_failed_install
cp requirements.txt "$environment/$stamp.partial"
mv "$environment/$stamp.partial" "$environment/$stamp"
rm -f "$log"
discard "$previous"
say 'done'
