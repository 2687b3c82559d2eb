//! Dependencies between runnables: their names, their rules and their order.

use crate::config::ConfigViolation;

/// A name of the dependency graph.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DependencyEntry {
    /// The name in `depends_on`.
    pub name: String,
    /// The DN that must be ready.
    pub dn: String,
    /// A clause that starts with "which": the reason why it does not run, and what to do. `None` if it runs.
    pub unavailable: Option<String>,
    /// The names of its dependencies.
    pub depends_on: Vec<String>,
    /// The table of its `depends_on`, for errors.
    pub section: String,
}

impl DependencyEntry {
    /// The entry of a runnable below this one.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        let (name, dn) = (format!("{}.{name}", self.name), format!("{}.{name}", self.dn));
        Self { name, dn, depends_on: Vec::new(), ..self.clone() }
    }

    /// Sets why it does not run.
    #[must_use]
    pub fn unavailable(self, why: Option<impl Into<String>>) -> Self {
        Self { unavailable: why.map(Into::into), ..self }
    }

    /// Adds dependencies that the configuration need not name.
    #[must_use]
    pub fn after<'n>(mut self, names: impl IntoIterator<Item = &'n str>) -> Self {
        for name in names {
            if !self.depends_on.iter().any(|known| known == name) {
                self.depends_on.push(name.to_owned());
            }
        }
        self
    }
}

/// Returns whether a DN is below another.
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
        // An entry that is ordered has all its dependencies before it. This also ends the visits of shared
        // dependencies.
        if self.ordered.contains(&entry) {
            return Ok(());
        }
        // An entry that is still on the path depends on itself: the cycle starts at its first visit.
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

/// Checks the dependencies between parts and services.
pub(crate) fn check_dependencies(entries: &[DependencyEntry]) -> Result<(), ConfigViolation> {
    // A service of the configuration comes after the parts, so that the error names the service and not the part.
    for (index, entry) in entries.iter().enumerate() {
        if entries[..index].iter().any(|other| other.name == entry.name) {
            let message = format!("{:?} is a part of this node; use another name", entry.name);
            return reject(field_of(entry, "name"), message);
        }
    }
    // Unknown names are reported first: a cycle can only be found among known ones.
    entries.iter().try_for_each(|entry| check_entry(entries, entry))?;
    check_cycles(entries)
}

/// A key in the section of an entry. A part without a section has none.
fn field_of(entry: &DependencyEntry, key: &str) -> String {
    match entry.section.as_str() {
        "" => String::new(),
        section => format!("{section}.{key}"),
    }
}

fn check_entry(entries: &[DependencyEntry], entry: &DependencyEntry) -> Result<(), ConfigViolation> {
    for (at, dependency) in entry.depends_on.iter().enumerate() {
        let field = field_of(entry, &format!("depends_on[{at}]"));
        let list = match field.as_str() {
            "" => format!("the dependencies of {}", entry.name),
            _ => "depends_on".to_owned(),
        };
        if entry.depends_on[..at].contains(dependency) {
            return reject(field, format!("duplicate dependency {dependency:?}; remove one"));
        }
        let Some(known) = entries.iter().find(|known| known.name == *dependency) else {
            // Parts first, then what is below them.
            let mut known: Vec<_> = entries.iter().collect();
            known.sort_by_key(|known| known.dn.matches('.').count());
            let names: Vec<_> = known.iter().map(|known| known.name.as_str()).collect();
            let message = format!("unknown service {dependency:?} in {list}; known: {}", names.join(", "));
            return reject(field, message);
        };
        // Waiting for it would never end, and so it is an error of the configuration.
        if let Some(unavailable) = &known.unavailable {
            return reject(field, format!("{} depends on {dependency}, {unavailable}", entry.name));
        }
    }
    Ok(())
}

fn check_cycles(entries: &[DependencyEntry]) -> Result<(), ConfigViolation> {
    // A runnable below another waits for what that one waits for.
    let dependencies_of = |index: usize| -> Vec<usize> {
        let entry = &entries[index];
        let is_dependency = |other: &DependencyEntry| {
            entry.depends_on.contains(&other.name) || is_descendant(&entry.dn, &other.dn)
        };
        (0..entries.len()).filter(|other| is_dependency(&entries[*other])).collect()
    };
    match order_by_dependencies(entries.len(), dependencies_of) {
        Ok(_) => Ok(()),
        Err(cycle) => {
            let names: Vec<_> = cycle.iter().map(|index| entries[*index].name.as_str()).collect();
            let section =
                cycle.iter().map(|index| &entries[*index].section).find(|section| !section.is_empty());
            // The cycle may start at a part without a section. The error is at the first entry whose section an
            // operator can edit.
            let field = section.map(|section| format!("{section}.depends_on")).unwrap_or_default();
            reject(field, format!("dependency cycle: {}", names.join(" -> ")))
        }
    }
}

fn reject(field: String, message: String) -> Result<(), ConfigViolation> {
    Err(ConfigViolation::new(field, message))
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
