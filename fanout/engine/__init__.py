"""What isolates a command. Engines receive directories to mount, never disks."""
