# The virtual environment that scripts/test and scripts/demo run in. Sourced from the repository's
# root; asks for nothing but Python 3.10 or newer (PYTHON=... chooses which).

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# run WHAT COMMAND...: says what happens, and ends everything where it fails.
run() {
    local what=$1 code=0
    shift
    printf '==> %s\n' "$what"
    "$@" || code=$?
    if ((code)); then
        printf '==> FAILED: %s (exit code %d)\n' "$what" "$code" >&2
        exit "$code"
    fi
}

fail() {
    printf '==> FAILED: %s\n' "$*" >&2
    exit 1
}

# Twice quiet: warnings about a machine's pip settings are not about this project.
pip_install() {
    .venv/bin/python -m pip install --quiet --quiet --constraint constraints.txt "$@"
}

# prepare LEVEL: "demo" is the library with PyTorch, "dev" adds what checks and tests need. What
# was installed is stamped, so that the next run installs only what the requirements changed.
prepare() {
    local level=$1 python=${PYTHON:-python3} place wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is missing or older than 3.10; name another with PYTHON=python3.12 $0"

    # Paths inside an environment are absolute: a copied or renamed repository needs its own.
    place="$PWD, Python $("$python" -c 'import sys; print(sys.version)' | tr '\n' ' ')"
    if [[ $(cat .venv/place 2>/dev/null) != "$place" ]]; then
        run "environment in .venv" "$python" -m venv --clear .venv
        printf '%s\n' "$place" >.venv/place
    fi

    wanted=$(sha256sum pyproject.toml constraints.txt scripts/environment.sh \
        hatch_build.py penstock/_kernel.c)
    if [[ $(cat ".venv/installed-$level" 2>/dev/null) != "$wanted" ]]; then
        # First and by itself, so that nothing else decides which torch it is.
        run "PyTorch" pip_install torch
        run "build tools" pip_install hatchling editables
        if [[ $level == demo ]]; then
            run "Penstock" pip_install --no-build-isolation --editable '.[image]'
        else
            run "Penstock and its tools" pip_install --no-build-isolation --editable '.[dev]'
            # Tests compare with its transforms, which are Python: that its compiled operators may
            # not fit this build of torch does not matter (tests put stand-ins for the two that
            # its import asks for), and that it would bring another torch does.
            run "torchvision" pip_install --no-deps torchvision
            run "other libraries for tests" pip_install albumentations datasets
        fi
        # What serves development serves the demo too.
        printf '%s\n' "$wanted" | tee .venv/installed-demo ".venv/installed-$level" >/dev/null
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    unset PYTHONHOME
}
