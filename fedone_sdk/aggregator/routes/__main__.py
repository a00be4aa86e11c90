"""Print the contract of devices: ``python -m fedone_sdk.aggregator.routes``."""

from fedone_sdk.aggregator.routes.app import device_document

if __name__ == "__main__":
    print(device_document(), end="")
