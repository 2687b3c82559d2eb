//! The only unsafe code of the program.
#![allow(unsafe_code, reason = "glibc's allocator is configured by calls that no library wraps")]

/// The size from which an allocation gets separate pages, and how much free memory the allocator keeps, in bytes.
/// These are glibc's initial values: by itself it raises both, up to 64 MiB, with the largest list that is freed.
#[cfg(target_env = "gnu")]
const THRESHOLD_BYTES: libc::c_int = 128 << 10;

/// Lets the allocator return memory that is no longer needed, at the price of a lock that all threads share. By default
/// each of the threads that create volumes keeps separate memory.
///
/// To be called before the first thread is started. *Source:* mallopt(3).
pub(crate) fn limit_free_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, THRESHOLD_BYTES),
    ] {
        // SAFETY: the call has no requirements. It fails for unknown parameters, which then keep their defaults.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives the kernel the free pages between what is in use, which the allocator keeps.
///
/// *Source:* malloc_trim(3).
pub(crate) fn return_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call has no requirements, and locks the allocator.
    unsafe {
        libc::malloc_trim(0);
    }
}
