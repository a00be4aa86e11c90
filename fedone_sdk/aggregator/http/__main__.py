"""Print the contract of devices: ``python -m fedone_sdk.aggregator.http``."""

from fedone_sdk.aggregator.http.application import device_document

if __name__ == "__main__":
    print(device_document(), end="")
