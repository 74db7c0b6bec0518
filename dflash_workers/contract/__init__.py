"""The contract: the records, keys, errors and protocols that all three packages keep to."""
