"""Engine `qemu`: every command in a virtual machine of its own. Owns no code; see the modules."""
