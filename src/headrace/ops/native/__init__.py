"""C++ kernels of the fast CPU ops, and their build."""
