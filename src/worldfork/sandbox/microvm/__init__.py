"""Sandboxes in virtual machines: QEMU's `microvm`, started from images and from saved memory."""
