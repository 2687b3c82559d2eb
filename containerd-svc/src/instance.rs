//! Tells apart the programs that import into one containerd.

use std::fmt;
use std::str::FromStr;

use crate::image::Labels;
use crate::plan::{BUNDLE_LABEL_PREFIX, OTHER_LABEL_PREFIX, PRIOR_LABEL_PREFIX};

/// The name of one of several programs that import into one containerd; by default empty, for the only one.
///
/// Each program has marks and leases of its own: it neither unpins images of the others, nor discards their imports. If several
/// have different images for one name, it belongs to the one whose instance sorts first, also while that does not run.
///
/// As text, 1 to 32 lower-case letters, digits and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct InstanceId(String);

/// An invalid name of an instance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid instance {0:?}: use 1 to 32 lower-case letters, digits and -")]
pub struct InvalidInstanceId(String);

impl FromStr for InstanceId {
    type Err = InvalidInstanceId;

    fn from_str(text: &str) -> Result<Self, InvalidInstanceId> {
        let is_valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        match (1..=32).contains(&text.len()) && text.bytes().all(is_valid) {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidInstanceId(text.to_owned())),
        }
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl InstanceId {
    /// The label of the marks of this instance on images: those of the only one are those of releases without instances.
    fn label_prefix(&self) -> String {
        match self.0.is_empty() {
            true => BUNDLE_LABEL_PREFIX.to_owned(),
            false => format!("{OTHER_LABEL_PREFIX}{}/", self.0),
        }
    }

    /// Labels of the store as a plan sees them: marks of this instance without its name, and others by their precedence.
    pub(crate) fn read_labels(&self, labels: Labels) -> Labels {
        let read = |(key, value): (String, String)| {
            let (instance, file) = match key.strip_prefix(BUNDLE_LABEL_PREFIX) {
                Some(file) => ("", file),
                None => match key.strip_prefix(OTHER_LABEL_PREFIX).and_then(|rest| rest.split_once('/')) {
                    Some(split) => split,
                    None => return (key, value),
                },
            };
            let key = match instance.cmp(&self.0) {
                std::cmp::Ordering::Equal => format!("{BUNDLE_LABEL_PREFIX}{file}"),
                std::cmp::Ordering::Less => format!("{PRIOR_LABEL_PREFIX}{instance}/{file}"),
                std::cmp::Ordering::Greater => format!("{OTHER_LABEL_PREFIX}{instance}/{file}"),
            };
            (key, value)
        };
        labels.into_iter().map(read).collect()
    }

    /// The reverse of [`read_labels`](Self::read_labels).
    pub(crate) fn write_labels(&self, labels: Labels) -> Labels {
        let write = |(key, value): (String, String)| {
            let key = if let Some(file) = key.strip_prefix(BUNDLE_LABEL_PREFIX) {
                self.label_prefix() + file
            } else if let Some((instance, file)) =
                key.strip_prefix(PRIOR_LABEL_PREFIX).and_then(|rest| rest.split_once('/'))
            {
                Self(instance.to_owned()).label_prefix() + file
            } else {
                key
            };
            (key, value)
        };
        labels.into_iter().map(write).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_sees_its_own_marks_and_the_precedence_of_others() {
        let labels =
            ["nodekeel.preseed/a.tar", "nodekeel.preseed.b/a.tar", "nodekeel.preseed.c/x.tar", "other"];
        let labels: Labels = labels.iter().map(|key| ((*key).to_owned(), (*key).to_owned())).collect();
        for (instance, expected) in [
            (
                InstanceId::default(),
                ["nodekeel.preseed.b/a.tar", "nodekeel.preseed.c/x.tar", "nodekeel.preseed/a.tar"],
            ),
            (
                "b".parse().expect("valid"),
                ["nodekeel.preseed.c/x.tar", "nodekeel.preseed/a.tar", "nodekeel.preseed</a.tar"],
            ),
        ] {
            let read = instance.read_labels(labels.clone());
            let keys: Vec<_> = read.keys().map(String::as_str).filter(|key| *key != "other").collect();
            assert_eq!(keys, expected, "{instance}");
            assert_eq!(instance.write_labels(read), labels, "{instance}");
        }
        for text in ["", "A", "a/b", "a.b", "<", &"a".repeat(33)] {
            assert!(text.parse::<InstanceId>().is_err(), "{text}");
        }
    }
}
