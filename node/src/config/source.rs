//! The tables of the file as they are written, to name the keys that differ from another file.

use toml::{Table, Value};

use super::{LogConfig, NodedConfig};

/// A table in `[log]` that a reload applies, unlike the other keys of `[log]`.
pub(crate) const LOG_LEVELS: &str = "log.levels";

/// The file as it is written. Two configurations with the same values are equal, however they are written.
#[derive(Debug, Clone, Default)]
pub(super) struct SourceTables(pub(super) Table);

impl PartialEq for SourceTables {
    // Two texts with the same values are the same configuration. An edit of a comment changes nothing.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl NodedConfig {
    /// Returns whether the file sets `node.data`.
    pub(crate) fn sets_data(&self) -> bool {
        self.source.0.get("node").is_some_and(|node| node.get("data").is_some())
    }

    /// The keys below a table that two files set differently, as `table.key`; the table itself if the files do not
    /// explain the difference of its values.
    pub(crate) fn changed_keys(&self, new: &Self, path: &str) -> Vec<String> {
        let table_of = |config: &Self| {
            path.split('.').try_fold(&config.source.0, |table, name| table.get(name)?.as_table()).cloned()
        };
        let keys = changed_keys(table_of(self).as_ref(), table_of(new).as_ref());
        let mut keys: Vec<_> = keys.iter().map(|key| format!("{path}.{key}")).collect();
        // [log.levels] is a part of [log] in the file, but a reload applies it alone: it is compared for itself.
        keys.retain(|key| path == LOG_LEVELS || !key.starts_with(LOG_LEVELS));
        if keys.is_empty() { vec![path.to_owned()] } else { keys }
    }

    /// The keys of a `[[service]]` that two files set differently; empty if they do not explain why it changes.
    pub(crate) fn changed_service_keys(&self, new: &Self, name: &str) -> Vec<String> {
        let table_of = |config: &Self| {
            let services = config.source.0.get("service")?.as_array()?;
            let named = |service: &&Value| service.get("name").and_then(Value::as_str) == Some(name);
            services.iter().find(named)?.as_table().cloned()
        };
        changed_keys(table_of(self).as_ref(), table_of(new).as_ref())
    }

    /// Returns whether a table of the node or of a shipped part has the same values in another configuration, or the section of
    /// another part.
    pub(crate) fn has_same_section(&self, new: &Self, path: &str) -> bool {
        match path {
            "node" => self.node == new.node,
            // The levels are applied by a reload, and the rest of [log] is not: so they are set equal for this
            // comparison.
            "log" => LogConfig { levels: new.log.levels.clone(), ..self.log.clone() } == new.log,
            LOG_LEVELS => self.log.levels == new.log.levels,
            "events" => self.events == new.events,
            "control" => self.control == new.control,
            "health" => self.health == new.health,
            "storage" => self.storage == new.storage,
            "services.etcd" => self.services.etcd == new.services.etcd,
            "services.containerd" => self.services.containerd == new.services.containerd,
            "cluster" => self.cluster == new.cluster,
            "provisioner" => self.provisioner == new.provisioner,
            "service" => self.service == new.service,
            other => self.sections.has_same(&new.sections, other),
        }
    }
}

/// The keys whose values differ, as `key` or `key.key`, in their order in the new table.
fn changed_keys(old: Option<&Table>, new: Option<&Table>) -> Vec<String> {
    let empty = Table::new();
    let (old, new) = (old.unwrap_or(&empty), new.unwrap_or(&empty));
    let removed = old.iter().filter(|(key, _)| !new.contains_key(*key)).map(|(key, _)| key.clone());
    let changed = new.iter().flat_map(|(key, value)| match (old.get(key), value) {
        (Some(former), _) if former == value => Vec::new(),
        // A table of both files is compared key by key, so that only the keys that differ are named.
        (Some(Value::Table(former)), Value::Table(table)) => changed_keys(Some(former), Some(table))
            .into_iter()
            .map(|below| format!("{key}.{below}"))
            .collect(),
        _ => vec![key.clone()],
    });
    changed.chain(removed).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> NodedConfig {
        NodedConfig::parse_toml(Path::new("a.toml"), text).expect(text)
    }

    #[test]
    fn keys_that_differ_are_named_and_defaults_make_no_difference() {
        let service = |keys: &str| parse(&format!("[[service]]\nname = \"a\"\ncommand = [\"b\"]\n{keys}\n"));
        let old = service("directory = \"/\"\nlimits = { pids_max = 4, memory_max = 1024 }");
        let new = service("grace = \"1s\"\nlimits = { pids_max = 4, memory_max = \"2KiB\" }");
        assert_eq!(old.changed_service_keys(&new, "a"), ["grace", "limits.memory_max", "directory"]);
        assert!(old.changed_service_keys(&old, "a").is_empty() && !old.has_same_section(&new, "service"));
        let (old, new) = (parse(""), parse("node.name = \"node\"\n[log]\nbytes_per_dn = 1048576\n"));
        assert!(old == new && ["node", "log"].iter().all(|table| old.has_same_section(&new, table)));
        let new =
            parse("node.name = \"b\"\nservices.etcd.client_port = 7\n[provisioner]\nkubeconfig = \"/k\"\n");
        for (table, keys) in [
            ("node", "node.name"),
            ("services.etcd", "services.etcd.client_port"),
            ("provisioner", "provisioner.kubeconfig"),
        ] {
            assert!(!old.has_same_section(&new, table), "{table}");
            assert_eq!(old.changed_keys(&new, table), [keys]);
        }
    }
}
