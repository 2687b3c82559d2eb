//! Three and five voters, each in a private network namespace, with both releases of etcd.

mod checker;
mod health;
mod history;
mod joins;
mod membership;
mod site;
mod voter;

/// Tests on both releases; of those behind `soak:`, that on Debian's is left to `cargo xtask soak cluster-releases`.
macro_rules! on_both {
    ($($room:ident::$name:ident;)* => soak: $($long_room:ident::$long_name:ident;)*) => {
        mod debian {
            on_both! { @tests Debian "needs etcd, ip and root: it makes network namespaces"; $($room::$name;)* }
            on_both! { @tests Debian "soak: the newest etcd runs it, too"; $($long_room::$long_name;)* }
        }

        mod newest {
            on_both! {
                @tests Newest "needs go, ip and root: it makes network namespaces";
                $($room::$name;)* $($long_room::$long_name;)*
            }
        }
    };
    (@tests $release:ident $need:literal; $($room:ident::$name:ident;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = $need]
            async fn $name() {
                super::$room::$name(crate::etcd::EtcdVersion::$release.binary()).await;
            }
        )*
    };
}

on_both! {
    health::three_voters_are_not_ready_within_5_s_without_a_majority_and_ready_with_one;
    health::a_voter_without_credentials_tells_so_whenever_it_is_asked;
    history::no_acknowledged_write_is_lost_whatever_happens_to_three_voters;
    joins::a_lost_disk_whose_ticket_was_kept_is_refused_and_no_acknowledged_write_is_lost;
    joins::a_join_that_an_earlier_release_has_started_is_completed;
    joins::a_voter_that_an_earlier_release_has_started_resumes_without_a_majority;
    membership::a_member_joins_right_after_another;
    => soak:
    health::five_voters_are_not_ready_within_5_s_without_a_majority_and_ready_with_one;
    health::a_voter_that_is_cut_off_is_not_ready_within_5_s_and_the_others_are;
    health::an_alarm_takes_readiness_from_every_voter_until_it_is_disarmed;
    health::a_voter_at_its_cold_start_tells_who_is_missing_for_a_majority;
    joins::a_clone_with_the_ticket_is_refused_and_the_original_returns;
    joins::the_second_host_with_a_ticket_is_refused_and_the_first_completes_its_join;
    joins::a_host_whose_member_another_host_became_is_refused;
    joins::a_ticket_used_on_a_host_that_is_gone_is_revoked_and_another_joins;
    joins::a_ticket_whose_member_was_removed_is_refused;
    joins::a_joiner_waits_for_a_majority_and_names_who_does_not_answer;
    membership::five_voters_join_with_at_most_20_raft_entries_each;
    membership::a_ticket_of_a_cluster_with_a_dead_voter_fails_with_its_name_and_what_to_do;
    membership::a_member_that_was_cut_off_deposes_no_leader;
    membership::a_deleted_list_of_revoked_certificates_is_fetched_again;
}
