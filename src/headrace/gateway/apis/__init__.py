"""The APIs that agents speak, each from its own words to the gateway's and back."""
