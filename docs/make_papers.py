"""Writes the tables of rows and parts in docs/papers.md from `rondel.algos.table`:
`python docs/make_papers.py`. A test compares.
"""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path

from rondel.algos.table import FAMILIES, TABLE, Algorithm

PAGE = Path(__file__).with_name("papers.md")
RECIPES = Path(__file__).parents[1] / "recipes"
BEGIN, END = "<!-- rows: written by docs/make_papers.py -->\n", "<!-- end of rows -->\n"
BAR = "\\|"  # within a table
TITLES = {
    "arXiv:2402.03300": "DeepSeekMath",
    "arXiv:2503.20783": "Understanding R1-Zero-like training",
    "arXiv:2503.14476": "DAPO",
    "arXiv:1707.06347": "PPO",
    "arXiv:2402.14740": "Back to basics",
    "doi:10.1007/BF00992696": "Williams 1992",
    "arXiv:2203.02155": "InstructGPT",
    "arXiv:2507.18071": "GSPO",
    "arXiv:2507.20673": "Geometric-mean policy optimization",
    "arXiv:2506.13585": "MiniMax-M1",
    "arXiv:2511.20347": "SAPO",
    "arXiv:2602.04879": "Rethinking the trust region",
    "arXiv:2501.12599": "Kimi k1.5",
    "arXiv:2505.22617": "The entropy mechanism",
    "arXiv:2506.01939": "Beyond the 80/20 rule",
    "arXiv:2505.23585": "On-policy RL with optimal baseline",
    "arXiv:2310.10505": "ReMax",
    "arXiv:2503.19595": "Optimizing pass@k",
    "arXiv:2602.02710": "Maximum likelihood RL",
    "arXiv:2504.02546": "GPG",
    "arXiv:2601.05242": "GDPO",
    "arXiv:2501.03262": "REINFORCE++",
    "arXiv:2304.06767": "RAFT",
    "arXiv:2505.24298": "AReaL",
    "arXiv:2503.14286": "Tapered off-policy REINFORCE",
    "arXiv:2505.24034": "LlamaRL",
    "arXiv:2510.01161": "M2PO",
    "arXiv:2504.14945": "LUFFY",
    "arXiv:2306.08543": "MiniLLM",
    "arXiv:2402.04792": "Online AI feedback",
    "arXiv:2602.10693": "VESPO",
    "arXiv:2602.05261": "LUSPO",
    "arXiv:2606.09821": "Rethinking the divergence regularization",
    "arXiv:2607.06987": "UP",
    "arXiv:2603.19835": "FIPO",
    "arXiv:2603.01365": "Align and filter",
    "https://ringtech.notion.site/kpop": "KPop",
    "arXiv:2505.20686": "A*PO",
    "arXiv:2602.05630": "REAL",
    "arXiv:2510.13786": "ScaleRL",
    "https://github.com/PrimeIntellect-ai/prime-rl": "prime-rl",
    "arXiv:2506.24119": "SPIRAL",
    "arXiv:2505.10978": "GiGPO",
    "arXiv:2606.22600": "IW-OPD",
    "arXiv:2602.07078": "Optimal token baseline",
    "arXiv:2605.15155": "SDAR",
    "arXiv:2609.20807": "Score centering",
    "arXiv:2601.19897": "SDFT",
    "arXiv:2601.18734": "OPSD",
    "arXiv:2601.20802": "SDPO",
    "arXiv:2604.03128": "RLSD",
    "https://github.com/areal-project/AReaL/pull/1600": "AReaL",
    "arXiv:2608.31046": "OPSA",
    "arXiv:2607.18082": "CriPO",
    "arXiv:2609.13443": "Never give up",
    "arXiv:2606.07950": "CoDaPO",
    "https://yifanzhang-pro.github.io/KLPO": "KLPO",
    "arXiv:2604.01193": "SSD",
    "arXiv:2505.05470": "Flow-GRPO",
    "arXiv:2512.04332": "DDRL",
    "arXiv:2305.13301": "DDPO",
}
ORACLES = {  # beside the one of every row: the test of what is its own
    "grpo": "test_eps_matters_exactly_where_a_group_nearly_agrees",
    "dr_grpo": "test_advantages_are_their_closed_forms",
    "dapo": "test_overlong_is_piecewise_linear",
    "ppo": "test_the_value_loss_case_by_case",
    "rloo": "test_advantages_are_their_closed_forms",
    "reinforce": "test_on_the_first_update_clip_is_the_policy_gradient",
    "sft": "test_the_explained_slope_of_a_row_is_its_gradient",
    "gspo": "test_gspo_pushes_every_token_by_the_ratio_of_its_sample",
    "gspo_token": "test_gspo_token_keeps_advantages_of_tokens_apart",
    "gmpo": "test_gmpo_shares_the_geometric_mean_among_the_tokens_that_are_not_held",
    "cispo": "test_cispo_keeps_the_gradient_of_a_clipped_token",
    "sapo": "test_sapo_is_the_policy_gradient_at_one_and_fades_away_from_it",
    "dppo_tv": "test_dppo_forgives_a_rare_token_its_ratio_and_holds_a_common_one",
    "dppo_kl": "test_the_binary_divergences_are_those_of_two_outcomes",
    "kimi": "test_mirror_descent_is_stationary_where_the_log_ratio_is_the_advantage_over_tau",
    "clip_cov": "test_clip_cov_silences_its_share_of_the_range_and_spreads_it_evenly",
    "kl_cov": "test_kl_cov_holds_the_largest_covariances_only",
    "forking": "test_forking_tokens_are_those_of_highest_entropy",
    "opo": "test_the_length_baseline_has_the_least_variance_where_squared_gradients_grow_with_length",
    "remax": "test_a_row_is_its_formula_one_token_at_a_time",
    "pass_at_k": "test_advantages_are_those_of_verl",
    "maxrl": "test_maxrl_follows_the_log_of_the_pass_rate",
    "gpg": "test_gpg_counts_samples_with_signal_and_verl_counts_rewards_that_are_not_zero",
    "gdpo": "test_each_part_of_a_reward_has_its_own_scale",
    "reinforce_pp": "test_advantages_and_returns_one_token_at_a_time",
    "reinforce_pp_baseline": "test_whitening_is_over_all_tokens_so_a_long_sample_counts_more",
    "raft": "test_advantages_are_their_closed_forms",
    "decoupled": "test_decoupled_is_plain_when_the_behavior_was_the_anchor_and_is_right_when_it_was_stale",
    "topr": "test_topr_learns_good_answers_whoever_wrote_them_and_bad_ones_as_far_as_the_policy_would_write_them",
    "aipo": "test_aipo_caps_above_and_leaves_the_other_side_open",
    "m2po": "test_m2po_drops_as_few_outliers_as_bring_the_second_moment_down",
    "opd": "test_its_expected_gradient_is_that_of_the_reverse_kl",
    "online_dpo": "test_a_preference_has_the_gradient_of_dpo",
    "vespo": "test_vespo_weighs_an_answer_by_a_gamma_of_its_whole_ratio",
    "luspo": "test_luspo_is_gspo_times_the_length",
    "drpo": "test_drpo_attenuates_and_then_corrects",
    "up": "test_up_holds_bad_tokens_only",
    "fipo": "test_fipo_counts_what_followed_a_token",
    "vaco": "test_vaco_masks_what_leaves_in_an_answer_that_has_left",
    "kpop": "test_kpop_is_wide_in_ratios_for_a_rare_token_and_tight_for_a_common_one",
    "a_star_po": "test_a_star_po_rests_where_the_implied_reward_is_the_advantage",
    "real": "test_real_has_the_gradient_of_its_classification",
    "scalerl": "test_a_prompt_counts_as_much_as_any_other_and_its_tokens_alike",
    "gar": "test_gar_shares_what_the_winners_earned_by_the_judges_opinion",
    "rae": "test_each_agent_is_compared_with_what_it_usually_earns",
    "gigpo": "test_turns_that_saw_the_same_are_compared",
    "turn_ppo": "test_turns_are_the_steps_of_gae",
    "echo": "test_echo_learns_the_tokens_that_came_back_as_a_likelihood_of_their_own",
    "otb": "test_the_baseline_of_a_place_has_the_least_variance_there",
    "iw_opd": "test_early_tokens_are_taught_more",
    "score_centering": "test_what_is_the_same_for_every_draw_moves_nothing",
    "sdft": "test_whole_distributions_are_compared_with_what_it_would_have_said",
    "opsd": "test_whole_distributions_are_compared_with_what_it_would_have_said",
    "sdpo": "test_the_policy_reads_the_context_and_scores_the_same_answer",
    "rlsd": "test_rlsd_takes_the_direction_from_the_reward_and_the_size_from_the_teacher",
    "codapo": "test_codapo_counts_a_question_by_confidence_and_difficulty",
    "klpo": "test_klpo_rests_where_the_reward_has_tilted_the_sampler",
    "ngu": "test_ngu_anchors_at_the_right_ones_and_adds_up_to_0",
    "cripo": "test_the_policy_scores_its_answers_again_behind_hints",
    "opsa": "test_opsa_lowers_the_least_likely_tokens_most_where_they_were_least_decided",
    "ssd": "test_ssd_learns_the_models_own_distribution",
    "flow_grpo": "test_a_narrow_clip_holds_a_density_that_has_moved",
    "ddpo": "test_ddpo_compares_a_prompt_with_what_it_has_earned_so_far",
    "ddrl": "test_ddrl_leaves_the_bad_before_it_tells_the_good_apart",
    "sdar": "test_sdar_learns_what_the_teacher_finds_likelier",
    "luffy": "test_luffy_weighs_a_demonstrated_token_by_how_undecided_the_policy_is_about_it",
}


def linked(paper: str) -> str:
    """A title with its address."""
    kind, _, name = paper.partition(":")
    if kind == "https":
        return f"[{TITLES[paper]}]({paper})"
    return f"[{TITLES[paper]}](https://{'arxiv.org/abs' if kind == 'arXiv' else 'doi.org'}/{name})"


def recipe(name: str) -> str:
    """A link to the recipe that trains with this row, if there is one of its name; that of grpo is tiny."""
    file = RECIPES / f"{'tiny' if name == 'grpo' else name}.toml"
    return f" ([recipe](../recipes/{file.name}))" if file.exists() else ""


def line(row: Algorithm) -> str:
    """| `grpo` | paper | A | l | w | beside | oracle |"""
    usual = {"shaping": "reward", "ratio": str(TABLE["grpo"].ratio), "correction": "1"}
    letters = {"shaping": "R", "ratio": "r", "correction": "c"}
    beside = [
        f"{letters[family]} = `{row.parts[family]}`"
        for family, text in usual.items()
        if family not in row.idle and str(row.parts[family]) != text
    ]
    beside += [f"d = `{row.distill}`"] if row.distill.coef else []
    beside += [f"the critic's loss `{row.value}`"] if "value" not in row.idle else []
    beside += [f"filter `{name}`" for name in row.filters]
    beside += [f"needs {need.replace('_', ' ')}" for need in sorted(row.needs - {"advantages", "behavior_logprobs"})]
    advantage = "not read" if "advantage" in row.idle else f"`{row.advantage}`"
    cells = (
        f"`{row.name}`{recipe(row.name)}",
        linked(row.paper),
        advantage,
        f"`{row.surrogate}`",
        f"`{row.aggregate}`",
        "; ".join(beside),
        f"`{ORACLES[row.name]}`",
    )
    return "| " + " | ".join(cell.replace("|", BAR) for cell in cells) + " |\n"


def parts() -> str:
    """Every part with the first line of its docstring: formula, shapes, paper."""
    lines = "| part | `kind` | formula and paper |\n|---|---|---|\n"
    for family, classes in FAMILIES.items():
        for kind, cls in classes.items():
            told = " ".join(cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
            lines += f"| `{family}` | `{kind}` | {told.replace('|', BAR)} |\n"
    return lines


def page() -> str:
    """The page as it should be: the text around the tables stays."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = "| `algo.kind` | paper | A | l | w | beside | oracle |\n|---|---|---|---|---|---|---|\n" + "".join(
        map(line, TABLE.values())
    )
    return before + BEGIN + rows + "\n## Parts\n\n" + parts() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
