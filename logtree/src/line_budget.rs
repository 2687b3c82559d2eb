//! The memory of line writers, and of the lines without their end, which share a budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that every partial line has without asking.
const FREE_BYTES: usize = 256;
/// Memory of a writer, with its buffers.
const WRITER_BYTES: usize = 2048;

/// The bytes that are left for partial lines, and the number of their writers.
#[derive(Debug)]
pub(crate) struct PartialLineBudget {
    total: usize,
    left: AtomicUsize,
    writers: AtomicUsize,
}

impl PartialLineBudget {
    pub(crate) fn new(bytes: usize) -> PartialLineBudget {
        PartialLineBudget { total: bytes, left: AtomicUsize::new(bytes), writers: AtomicUsize::new(0) }
    }

    /// The memory of all writers and their partial lines.
    pub(crate) fn used_bytes(&self) -> usize {
        let partial_lines = self.total - self.left.load(Ordering::Relaxed);
        partial_lines + self.writers.load(Ordering::Relaxed) * WRITER_BYTES
    }

    fn take(&self, bytes: usize) -> bool {
        let left = |left: usize| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The start of a line of one writer, in memory from the budget.
#[derive(Debug)]
pub(crate) struct PartialLine {
    budget: Arc<PartialLineBudget>,
    bytes: Vec<u8>,
    /// The bytes that were taken from the budget.
    taken: usize,
}

impl PartialLine {
    pub(crate) fn new(budget: Arc<PartialLineBudget>) -> PartialLine {
        budget.writers.fetch_add(1, Ordering::Relaxed);
        PartialLine { budget, bytes: Vec::new(), taken: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Appends as many bytes as the budget allows, up to `limit` in total.
    pub(crate) fn extend(&mut self, bytes: &[u8], limit: usize) {
        let length = limit.min(self.bytes.len() + bytes.len());
        if length > self.capacity() {
            // Like a vector, to copy each byte only a few times.
            let capacity = length.next_power_of_two().min(limit);
            let more = capacity.saturating_sub(self.capacity());
            // If the budget is used up, the line is cut at the memory that it has.
            if self.budget.take(more) {
                self.taken += more;
            }
        }
        let room = self.capacity().min(limit) - self.bytes.len();
        let added = &bytes[..bytes.len().min(room)];
        if self.bytes.len() + added.len() > self.bytes.capacity() {
            self.bytes.reserve_exact(self.capacity().min(limit) - self.bytes.len());
        }
        self.bytes.extend_from_slice(added);
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        // Only memory of the budget is freed: the next line reuses that of a short one.
        if self.taken > 0 {
            self.bytes = Vec::new();
            self.budget.give_back(std::mem::take(&mut self.taken));
        }
    }

    fn capacity(&self) -> usize {
        FREE_BYTES + self.taken
    }
}

impl Drop for PartialLine {
    fn drop(&mut self) {
        self.clear();
        self.budget.writers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_lines_share_a_budget_and_return_it() {
        let budget = Arc::new(PartialLineBudget::new(1000));
        let mut lines: Vec<_> = (0..10).map(|_| PartialLine::new(Arc::clone(&budget))).collect();
        for _ in 0..100 {
            lines.iter_mut().for_each(|line| line.extend(&[b'x'; 7], 600));
        }
        let lengths: Vec<_> = lines.iter().map(|line| line.bytes().len()).collect();
        assert!(lengths.iter().all(|&length| length >= FREE_BYTES), "{lengths:?}");
        assert!(lengths.iter().sum::<usize>() <= 1000 + 10 * FREE_BYTES, "{lengths:?}");
        assert_eq!(lengths.iter().max(), Some(&600));
        assert!(lines.iter().all(|line| line.bytes.capacity() <= line.capacity()));
        lines[0].clear();
        lines.truncate(1);
        assert_eq!(budget.used_bytes(), WRITER_BYTES);
        lines[0].extend(&[b'x'; 1000], 600);
        assert_eq!(lines[0].bytes().len(), 600);
    }
}
