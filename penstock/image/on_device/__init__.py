"""Image operations on a device: whole tiny-batches, with parameters that the host has drawn."""
