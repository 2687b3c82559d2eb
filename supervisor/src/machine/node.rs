//! One node's record.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Time;
use super::shutdown::Stopping;
use crate::policy::Policy;
use crate::process::ProcessExit;
use crate::state::{Exit, MAX_EXITS, State};

/// How one node is to be treated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Settings {
    pub(crate) policy: Policy,
    pub(crate) stop_within: Duration,
}

/// One end, in the tree's own time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Past {
    pub(crate) at: Time,
    pub(crate) generation: u64,
    pub(crate) state: State,
    pub(crate) exit: Exit,
}

/// What is known of a DN beyond its node's life: handed on to the node that takes its place after a parent's restart.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(super) generation: u64,
    pub(super) failures: u32,
    pub(super) exits: VecDeque<Past>,
    pub(super) held: bool,
    pub(super) children: Heirs,
}

/// What is known of children by their names. Few nodes ever have any, and an empty `BTreeMap` is small.
pub(super) type Heirs = BTreeMap<Box<str>, History>;

/// What a name below a node stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameUse {
    Child(u32),
    SubSpan,
}

/// Children that were added together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) members: Vec<u32>,
    /// How many members have something running in their subtree.
    pub(super) live: u32,
}

/// One node of the tree.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) dn: Arc<str>,
    pub(super) parent: Option<u32>,
    /// Its index in the parent's groups.
    pub(super) group: u32,
    pub(super) settings: Settings,
    pub(super) incarnation: u64,
    /// How often this DN has been started.
    pub(super) generation: u64,
    pub(super) phase: State,
    pub(super) since: Time,
    /// Since when it has no longer been working: it was cancelled, or has begun to end by itself.
    pub(super) ending_since: Option<Time>,
    /// Its context is cancelled, and so are all below it.
    pub(super) cancelled: bool,
    pub(super) signalled_done: bool,
    /// How it is going to have ended, whatever it returns.
    pub(super) doom: Option<Box<Exit>>,
    /// How this run's child process has ended, to be told should the run end without a word.
    pub(super) process: Option<Arc<ProcessExit>>,
    /// An operator holds it.
    pub(super) held: bool,
    /// It was an operator who has cancelled its run: however that ends, its group goes on.
    pub(super) told_to: bool,
    /// An operator wants it started again, at once and whatever its policy.
    pub(super) again: bool,
    /// What its runnable waits for by `wait_ready`.
    pub(super) dependency: Option<Arc<str>>,
    pub(super) names: HashMap<Box<str>, NameUse>,
    pub(super) groups: Vec<Group>,
    /// How many nodes of its subtree, itself included, have a task.
    pub(super) live: u32,
    pub(super) failures: u32,
    pub(super) exits: VecDeque<Past>,
    /// What its children of the incarnation before left behind.
    pub(super) former: Heirs,
    pub(super) timer: Option<Time>,
    /// Set when its turn in a shutdown has come.
    pub(super) stopping: Option<Stopping>,
}

impl Node {
    pub(super) fn new(
        dn: Arc<str>,
        parent: Option<u32>,
        group: u32,
        settings: Settings,
        now: Time,
        history: History,
    ) -> Self {
        Self {
            dn,
            parent,
            group,
            settings,
            incarnation: 0,
            generation: history.generation,
            phase: State::Waiting,
            since: now,
            ending_since: None,
            cancelled: false,
            signalled_done: false,
            doom: None,
            process: None,
            held: history.held,
            told_to: false,
            again: false,
            dependency: None,
            names: HashMap::new(),
            groups: Vec::new(),
            live: 0,
            failures: history.failures,
            exits: history.exits,
            former: history.children,
            timer: None,
            stopping: None,
        }
    }

    /// The last part of the DN.
    pub(super) fn name(&self) -> &str {
        self.dn.rsplit('.').next().unwrap_or(&self.dn)
    }

    pub(super) fn enter(&mut self, phase: State, now: Time) {
        self.phase = phase;
        self.since = now;
    }

    /// How a run has ended that was not to end, and says nothing of it.
    pub(super) fn returned(&mut self) -> Exit {
        match self.process.take() {
            Some(exit) => Exit::Failed { error: format!("{exit} by itself"), process: Some(exit) },
            None => Exit::Returned,
        }
    }

    pub(super) fn remember(&mut self, past: Past) {
        if self.exits.len() == MAX_EXITS {
            self.exits.pop_front();
        }
        self.exits.push_back(past);
    }

    /// The slots of its children, in the order in which they were added.
    pub(super) fn children(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.groups.iter().flat_map(|group| group.members.iter().copied())
    }
}
