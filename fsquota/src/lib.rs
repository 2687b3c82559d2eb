//! Project quotas of XFS and ext4 by system call: limits and usage of a directory tree in bytes and inodes.
