//! Tests of the crate as others see it.
//!
//! Where the facts of the original's own tests, and the rows of its tables, are shown (with what is right where it was not):
//!
//! | Fact or row | Shown by |
//! |---|---|
//! | a member alone is made; its keys are put and read | `etcd::life::the_keys_keep_the_contract`, `memory::the_store_keeps_the_contract` |
//! | it tells its number and name, those of a list of one | `etcd::life::a_member_alone_keeps_the_contract`, `memory::a_member_keeps_the_contract` |
//! | started again from the disk it has its key, its authority, its data | `etcd::life::a_restart_finds_the_same_authority_and_data` |
//! | a revoked serial number is on the disk's list within 5 s | `etcd::refused::a_revocation_comes_to_the_disk_and_refuses_the_client` |
//! | a second member, added by the first, reads what that has written | `etcd::cluster::a_learner_joins_and_is_promoted` |
//! | etcd's log lines: fields, callers, empty ones, what is none | logtree's `parse::zap` |
//! | keys end where their prefix does; names have no slash | `consensus::etcd::convert`, `node::id` (unit tests) |
//! | an authority that may not certify, a leaf that would, another's certificate | `pki::stored::values_of_another_authority_are_refused`, `a_leaf_is_no_authority_on_the_disk_either` |
//! | a ticket is the same however often it is asked for | `nodes::tickets::however_often_a_ticket_is_asked_for_there_is_one_node_and_one_learner` |
//! | no file, nothing from QEMU: a cluster is founded, and nothing that is there is given up | `machine::flows::a_machine_without_anything_founds_a_cluster_and_knows_itself_in_it`, `machine::refusals::a_data_set_without_a_journal_is_refused_until_it_is_given_up_by_name` |
//! | no file, a ticket from QEMU: it joins | `machine::flows::a_machine_that_has_no_file_of_its_own_joins_by_what_qemu_shows` |
//! | a ticket in the file: it joins, and QEMU is not asked | `machine::flows::a_machine_with_a_ticket_joins_and_needs_it_no_more`, `nodes::enrolment::a_ticket_is_found_in_either_place_and_the_nodes_own_wins` |
//! | a file that is empty, or no ticket: `Failed`, nothing is founded | `machine::cuts::a_cut_enrolment_configuration_is_an_error_that_names_it_and_nothing_is_founded`, `nodes::enrolment::{an_empty_file_is_no_ticket_and_is_not_absent, what_is_no_configuration_is_an_error_that_names_the_file_and_stays}` |
//! | a file, or QEMU's, that can't be read: an error, the next place is not tried | `nodes::enrolment::what_can_not_be_read_is_an_error_and_never_absent` |
//! | each pair of states; a final one takes nothing and stays | `machine::core_test::{each_pair_of_states_is_as_the_table_has_it_and_what_is_refused_changes_nothing, every_input_is_answered_in_every_state_and_final_ones_take_none}` (unit tests) |
//!
//! Registration of nodes by calls, modes of a TPM, policies of storage and the health of nodes are of later originals, and
//! not in this crate; nor is an address for metrics, which etcd has beside its keys.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[cfg(feature = "etcd")]
mod etcd;
mod follow;
mod machine;
mod memory;
#[cfg(feature = "netlink")]
mod network;
mod node;
mod nodes;
mod pki;
