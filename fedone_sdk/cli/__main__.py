"""``python -m fedone_sdk.cli``, where the console script is not on the path."""

from fedone_sdk.cli import main

if __name__ == "__main__":
    main()
