//! A node's directories as types: fd-relative access, atomic durable files, a step journal, the data partition.
