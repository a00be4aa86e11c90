"""``python -m fedone_sdk.cli``, for environments without the console script on the path."""

from fedone_sdk.cli import main

if __name__ == "__main__":
    main()
