# Sourced by the other scripts: creates a virtual environment, and installs the SDK into it.
# Usage: ensure_venv FOLDER EXTRAS

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c \
      'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "FedOne needs Python 3.11 or newer; set PYTHON to its path" >&2
  return 1
}

ensure_venv() {
  local folder=$1 extras=$2 python stamp
  # Install again only if the extras or pyproject.toml have changed.
  stamp=$(echo "$extras" | cat - pyproject.toml | cksum)
  if [ "$(cat "$folder/installed" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  python=$(find_python)
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
  echo "$stamp" >"$folder/installed"
}
