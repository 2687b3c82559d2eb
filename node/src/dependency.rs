//! Dependencies between runnables: their order.

/// Whether a DN is below another.
pub(crate) fn is_descendant(dn: &str, ancestor: &str) -> bool {
    dn.strip_prefix(ancestor).is_some_and(|rest| rest.starts_with('.'))
}

/// Sorts entries after their dependencies, and otherwise in their order: the indices. `dependencies_of` returns the
/// indices of an entry's dependencies.
///
/// # Errors
/// The indices of a dependency cycle; the first one is repeated at the end.
pub(crate) fn order_by_dependencies(
    count: usize,
    dependencies_of: impl Fn(usize) -> Vec<usize>,
) -> Result<Vec<usize>, Vec<usize>> {
    let mut visit = DependencyVisit { dependencies_of, path: Vec::new(), ordered: Vec::new() };
    (0..count).try_for_each(|entry| visit.visit_entry(entry))?;
    Ok(visit.ordered)
}

struct DependencyVisit<F> {
    dependencies_of: F,
    /// Path from the first visited entry to the current one.
    path: Vec<usize>,
    ordered: Vec<usize>,
}

impl<F: Fn(usize) -> Vec<usize>> DependencyVisit<F> {
    fn visit_entry(&mut self, entry: usize) -> Result<(), Vec<usize>> {
        if self.ordered.contains(&entry) {
            return Ok(());
        }
        if let Some(start) = self.path.iter().position(|visited| *visited == entry) {
            let mut cycle = self.path.split_off(start);
            cycle.push(entry);
            return Err(cycle);
        }
        self.path.push(entry);
        for dependency in (self.dependencies_of)(entry) {
            self.visit_entry(dependency)?;
        }
        self.path.pop();
        self.ordered.push(entry);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_follow_their_dependencies_and_a_cycle_is_named_from_its_start() {
        let order = |edges: &[&[usize]]| order_by_dependencies(edges.len(), |entry| edges[entry].to_vec());
        assert_eq!(order(&[&[2], &[], &[3], &[]]), Ok(vec![3, 2, 0, 1]));
        assert_eq!(order(&[&[], &[1]]), Err(vec![1, 1]));
        assert_eq!(order(&[&[1], &[2], &[3], &[1]]), Err(vec![1, 2, 3, 1]));
    }

    #[test]
    fn a_descendant_is_below_a_whole_name() {
        assert!(is_descendant("root.a.b", "root.a") && is_descendant("root.a", "root"));
        assert!(!is_descendant("root.ab", "root.a") && !is_descendant("root.a", "root.a"));
    }
}
