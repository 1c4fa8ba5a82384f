"""Tests in one fork, candidate in another: only plain values cross, and the host looks at each of them."""
