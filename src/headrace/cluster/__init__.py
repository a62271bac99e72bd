"""Where processes run. `local` places them on this machine; Ray is to be the second."""
