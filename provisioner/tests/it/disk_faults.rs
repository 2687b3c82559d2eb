//! Stores on real disks, to which something happens from outside.

mod restored;
mod unable;
