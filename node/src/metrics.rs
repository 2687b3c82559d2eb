//! Metrics in the OpenMetrics text format: those of the node itself, and of each part.
//!
//! A part adds a dedicated registry while it is prepared; all of them are served together. Names start with that of the
//! program or part; those of the node start with `nodekeel_`, or the program's own prefix.

mod node;

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;

pub(crate) use node::NodeFigures;

/// The metrics of the parts, by name. Cheap to clone.
#[derive(Clone, Default)]
pub struct MetricsRegistries(Vec<(String, Arc<Registry>)>);

impl MetricsRegistries {
    /// Adds the metrics of a part, with the part's name, or that of a runnable below it, as `fan.blade`. It replaces those
    /// of the same name: a part whose configuration is changed is prepared again. They are served while `root.<name>` is
    /// in the tree: a reload may remove it. The names of metrics must differ from those of all other parts.
    pub fn add(&mut self, name: impl Into<String>, registry: Registry) {
        let name = name.into();
        self.0.retain(|(known, _)| *known != name);
        self.0.push((name, Arc::new(registry)));
    }

    /// The text of the metrics of the node and its parts.
    pub(crate) fn encode(&self, figures: &NodeFigures) -> String {
        let mut text = String::new();
        let node = figures.to_registry();
        // A part that a reload has removed leaves its registry here: it is not served any more.
        let is_in_tree =
            |name: &str| figures.nodes.iter().any(|node| node.dn.strip_prefix("root.") == Some(name));
        let of_parts = self.0.iter().filter(|(name, _)| is_in_tree(name));
        let registries = std::iter::once(&node).chain(of_parts.map(|(_, registry)| registry.as_ref()));
        for registry in registries {
            // Writing into a string can't fail; a part's own collector may, and then loses its metrics only.
            let _ = encode_registry(&mut text, registry);
        }
        // OpenMetrics ends a text with one `# EOF`, after all registries.
        let _ = encode_eof(&mut text);
        text
    }
}

impl fmt::Debug for MetricsRegistries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;

    use super::*;
    use crate::v1::Node;

    fn registry(help: &str, value: u64) -> Registry {
        let (mut registry, counter) = (Registry::default(), Counter::<u64>::default());
        registry.register("fan_turns", help, counter.clone());
        counter.inc_by(value);
        registry
    }

    #[test]
    fn the_registries_of_all_parts_are_one_text_and_a_part_that_is_prepared_again_is_there_once() {
        let mut metrics = MetricsRegistries::default();
        metrics.add("fan", registry("Turns", 1));
        metrics.add("fan", registry("Turns of the fan", 2));
        metrics.add("removed", registry("Turns of another fan", 3));
        let fan = Node { dn: "root.fan".into(), ..Node::default() };
        let text = metrics.encode(&NodeFigures { nodes: vec![fan], ..NodeFigures::default() });
        assert!(text.contains("# HELP fan_turns Turns of the fan.\n"), "{text}");
        assert!(text.contains("fan_turns_total 2\n") && !text.contains("fan_turns_total 1\n"), "{text}");
        assert!(text.contains("nodekeel_healthy 1\n"), "{text}");
        assert!(!text.contains("another fan"), "a part that a reload has removed: {text}");
        assert_eq!((text.matches("# EOF\n").count(), text.ends_with("# EOF\n")), (1, true), "{text}");
    }
}
