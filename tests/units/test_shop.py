"""The shop: its database, every tool, the rules, the scripted user, and what an episode is worth."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import date

import pytest

from kits.shop import database, env, play, play_all, task_of, tasks
from rondel.generate.envs.shop.database import ShopSession
from rondel.generate.envs.shop.generator import make_database
from rondel.generate.envs.shop.line_calls import read_line_calls
from rondel.generate.envs.shop.rules import goal_changes
from rondel.generate.envs.shop.scripted_user import ScriptedUser, agrees
from rondel.generate.envs.shop.speech import PlainSpeech, ShortSpeech
from rondel.generate.envs.shop.task_set import make_tasks
from rondel.generate.envs.shop.tools import ShopTools
from rondel.generate.envs.shop.wishes import FACTS, UserGoal, Wish

NOTHING = {"orders": {}, "users": {}, "transferred": False}


def goal_of(task):
    return UserGoal.read(task.data["goal"])


# -- the database ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_database_is_of_realistic_size_and_agrees_with_itself():
    shop = database()
    assert len(shop.products) >= 2000 and len(shop.users) >= 1000 and len(shop.orders) >= 5000
    assert {row["status"] for row in shop.orders.values()} == {
        "pending", "processing", "shipped", "delivered", "cancelled",
    }  # fmt: skip
    for id, order in shop.orders.items():
        assert id in shop.users[order["user"]]["orders"] and order["payment"] in shop.users[order["user"]]["payments"]
        assert order["placed"] < shop.today and (order["delivered"] is None) == (order["status"] != "delivered")
        assert len({shop.product_of[item] for item in order["items"]}) == len(order["items"]) > 0
        prices = {i: shop.products[shop.product_of[i]]["variants"][i]["price"] for i in order["items"]}
        assert order["items"] == prices
    assert sum(len(user["orders"]) for user in shop.users.values()) == len(shop.orders)
    assert len({p["name"] for p in shop.products.values()}) == len(shop.products)
    for product in shop.products.values():
        variants = [tuple(v["options"].items()) for v in product["variants"].values()]
        assert len(set(variants)) == len(variants) > 1, "a variant is named by its options"


def test_equal_seeds_make_equal_shops_and_tasks(tmp_path):
    sizes = {"products": 40, "users": 20, "orders": 100}
    a, b, c = (make_database(seed, **sizes) for seed in (1, 1, 2))
    assert a.digest == b.digest != c.digest
    assert make_tasks(a, 20) == make_tasks(b, 20) != make_tasks(a, 20, seed=1)
    a.write(tmp_path)
    from rondel.generate.envs.shop.database import open_database

    assert open_database(tmp_path).digest == a.digest


def test_tasks_are_different_and_each_order_is_asked_about_once():
    shown, orders = Counter(t.data["prompt"] for t in tasks()), Counter()
    for task in tasks():
        orders.update({wish.order for wish in goal_of(task).wishes if wish.order})
    assert len(tasks()) == 200 == len(shown) and set(orders.values()) == {1}
    assert {t.data["family"] for t in tasks()} >= {
        "cancel",
        "late_cancel",
        "return",
        "exchange",
        "stranger",
        "two",
        "items",
    }
    assert {t.data["level"] for t in tasks()} == {1, 2, 3, 4}


# -- tools -----------------------------------------------------------------------------------------


def order_with(status, items=1, payment=""):
    shop = database()
    return next(
        id
        for id, row in shop.orders.items()
        if row["status"] == status and len(row["items"]) >= items and row["payment"].startswith(payment)
    )


def opened():
    session = ShopSession(database())
    return session, ShopTools(session)


def test_finding_reads_and_changes_nothing():
    session, tools = opened()
    shop = database()
    id, user = next(iter(shop.users.items()))
    for who in (id, user["email"].upper(), f"{user['name']},  {user['zip']}"):
        assert tools.find_user(who) == {"customer": id, "name": user["name"], "orders": user["orders"]}
    assert (
        tools.get_user(id)["address"] == user["address"]
        and tools.get_user(id)["payments"].keys() == user["payments"].keys()
    )
    order = tools.get_order(order_with("delivered"))
    assert (
        order["total"] == f"{sum(shop.orders[order['order']]['items'].values()) / 100:.2f}"
        and order["today"] == shop.today
    )
    product = tools.get_product("p0007")
    assert product == tools.get_product(product["name"].upper()) and "in stock" in next(
        iter(product["variants"].values())
    )
    assert tools.search_products(product["name"]) == [f"p0007 {product['name']}"]
    assert len(tools.search_products("kettle")) == 10
    assert session.changes() == NOTHING


def test_cancelling_refunds_a_gift_card():
    session, tools = opened()
    order = order_with("pending", payment="gift")
    row = database().orders[order]
    assert tools.cancel_order(order, "mistake") == "cancelled"
    changes = session.changes()
    assert changes["orders"][order]["status"] == "cancelled" and changes["orders"][order]["changes"] == [
        "cancelled: mistake"
    ]
    before = database().users[row["user"]]["payments"][row["payment"]]
    after = changes["users"][row["user"]]["payments"][row["payment"]]
    assert after - before == sum(row["items"].values())
    assert database().orders[order]["status"] == "pending", "the database of other episodes"
    with pytest.raises(ValueError, match="is cancelled; this is for orders that are pending"):
        tools.cancel_order(order, "mistake")


def test_address_and_payment_of_a_pending_order_change():
    session, tools = opened()
    order = order_with("pending")
    tools.change_address(order, " 7  Elm Road, 12345 Halsey ")
    assert session.changes()["orders"][order]["address"] == "7 Elm Road, 12345 Halsey"
    wish = goal_of(task_of("payment")).wishes[0]
    total = sum(database().orders[wish.order]["items"].values())
    tools.change_payment(wish.order, wish.payment)
    user = database().orders[wish.order]["user"]
    assert session.changes()["orders"][wish.order]["payment"] == wish.payment
    if (left := database().users[user]["payments"][wish.payment]) is not None:
        assert session.user(user)["payments"][wish.payment] == left - total


@pytest.mark.parametrize("family", ["items", "exchange"])
def test_items_become_other_variants_once(family):
    session, tools = opened()
    wish = goal_of(task_of(family)).wishes[0]
    name, arguments = wish.write
    said = getattr(tools, name)(**arguments)
    row = session.changes()["orders"][wish.order]
    assert set(wish.new_items) <= row["items"].keys() and not set(wish.items) & row["items"].keys()
    assert row["status"] == ("pending" if family == "items" else said)
    with pytest.raises(ValueError):
        getattr(tools, name)(**arguments)


def test_returning_is_noted_with_its_items_and_its_refund():
    session, tools = opened()
    order = order_with("delivered", items=2)
    row = database().orders[order]
    assert tools.return_items(order, list(row["items"])[:1], row["payment"]) == "return requested"
    [change] = session.changes()["orders"][order]["changes"]
    assert change == f"return {next(iter(row['items']))} to {row['payment']}"


def test_handing_over_is_a_change():
    session, tools = opened()
    tools.transfer_to_human("an invoice")
    assert session.changes() == NOTHING | {"transferred": True}


@pytest.mark.parametrize(
    ("call", "arguments", "says"),
    [
        ("find_user", {"who": "nobody"}, "no such customer"),
        ("get_user", {"customer": "u9"}, "there is no customer u9"),
        ("get_order", {"order": "1"}, "there is no order 1"),
        ("get_product", {"product": "p"}, "there is no product p"),
        ("search_products", {"text": "kettle lamp"}, "no product has all these words"),
        ("cancel_order", {"order": "SHIPPED", "reason": "mistake"}, "is shipped; this is for orders that are pending"),
        ("cancel_order", {"order": "PENDING", "reason": "ugly"}, "one of: mistake, unneeded"),
        ("change_address", {"order": "PENDING", "address": "here"}, "not whole"),
        ("change_payment", {"order": "PENDING", "payment": "card_0"}, "has no payment method card_0; there are:"),
        ("change_items", {"order": "PENDING", "items": ["1"], "new_items": ["2"], "payment": "x"}, "name items of this order"),
        ("return_items", {"order": "PENDING", "items": [], "refund_to": "x"}, "is pending; this is for orders that are delivered"),
        ("return_items", {"order": "DELIVERED", "items": [], "refund_to": "x"}, "name items of this order"),
        ("exchange_items", {"order": "DELIVERED", "items": ["OWN"], "new_items": [], "payment": "x"}, "one new item for each"),
        ("exchange_items", {"order": "DELIVERED", "items": ["OWN"], "new_items": ["OWN"], "payment": "x"}, "no other variant"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_and_changes_nothing(call, arguments, says):
    session, tools = opened()
    orders = {status.upper(): order_with(status) for status in ("pending", "shipped", "delivered")}
    own = next(iter(database().orders[orders["DELIVERED"]]["items"]))

    def filled(value):
        return [filled(one) for one in value] if isinstance(value, list) else {**orders, "OWN": own}.get(value, value)

    with pytest.raises(ValueError, match=says):
        getattr(tools, call)(**{name: filled(value) for name, value in arguments.items()})
    assert session.changes() == NOTHING


def test_a_gift_card_pays_for_no_more_than_its_balance():
    session, tools = opened()
    order, poor = next(
        (order, payment)
        for order, row in database().orders.items()
        for payment, left in database().users[row["user"]]["payments"].items()
        if row["status"] == "pending" and payment != row["payment"] and left is not None
        if left < sum(row["items"].values())
    )
    with pytest.raises(ValueError, match="has a balance of"):
        tools.change_payment(order, poor)
    assert session.changes() == NOTHING


def test_calls_as_lines_are_the_calls():
    speech = ShortSpeech()
    for task in tasks()[:60]:
        for name, arguments in goal_of(task).writes:
            [call] = read_line_calls(f"well\n{speech.call((name, arguments))}")
            assert (call.name, call.arguments) == (name, arguments)
    assert read_line_calls("I cancel: 51234") == []


# -- the rules -------------------------------------------------------------------------------------


def test_what_the_rules_forbid_is_never_a_goal():
    for task in tasks():
        goal = goal_of(task)
        for wish in goal.wishes:
            row = database().orders.get(wish.order)
            if wish.outcome != "done":
                continue
            assert row["user"] == goal.user
            assert row["status"] == ("delivered" if wish.kind in ("return", "exchange") else "pending")
            if wish.kind in ("return", "exchange"):
                assert (date.fromisoformat(database().today) - date.fromisoformat(row["delivered"])).days <= 30
            if wish.kind == "return":
                assert wish.payment == row["payment"] or wish.payment.startswith("gift_")


def test_what_is_refused_leaves_the_database_as_it_is():
    for task in tasks():
        if all(wish.outcome in ("refused", "answered") for wish in goal_of(task).wishes):
            assert goal_changes(database(), goal_of(task)) == NOTHING


# -- the user --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("short", [False, True])
def test_the_scripted_user_and_a_right_agent_reach_every_goal(short):
    """200 seeded tasks: every gold reply is used, the user leaves, nothing is left to say."""
    golds = [env(short).gold(task) for task in tasks()]
    for task, gold, chat in zip(tasks(), golds, play_all(tasks(), golds, short=short), strict=True):
        score = chat.trajectory.score
        assert (score.value, score.parts) == (1.0, {"database": 1.0, "said": 1.0, "rules": 1.0}), (task.id, chat.log)
        assert chat.asked == len(gold) <= env().turns
    for chat in play_all(tasks()[:40], [[]] * 40, short=short):
        assert chat.trajectory.score.value == 0.0


def answer(task, *texts, speech=None):
    user = ScriptedUser(goal_of(task), speech or PlainSpeech())
    return [asyncio.run(user.reply(text)) for text in texts]


def test_the_user_tells_what_it_is_asked_for_and_nothing_else():
    task = task_of("exchange")
    goal, wish = goal_of(task), goal_of(task).wishes[0]
    speech = PlainSpeech()
    for name in ("identity", *FACTS["exchange"]):
        assert answer(task, speech.asks(name))[0].text == speech.fact(name, goal, wish)
    both = answer(task, "What is the order number, and which payment method do you prefer?")[0].text
    assert wish.order in both and wish.payment in both and wish.options[0] not in both
    assert wish.payment not in answer(task_of("cancel"), "Which payment method?")[0].text


def test_the_user_agrees_to_its_own_wish_alone():
    for task in tasks():
        for wish in goal_of(task).wishes:
            if wish.outcome == "done":
                for speech in (PlainSpeech(), ShortSpeech()):
                    assert agrees(speech.proposes(wish), wish), speech.proposes(wish)
                assert not agrees(PlainSpeech().proposes(wish).replace(wish.order, "00000"), wish)
                assert not agrees(PlainSpeech().proposes(wish) + " And cancel order 99999, too?", wish)
                if wish.options:
                    assert not agrees(PlainSpeech().proposes(wish).replace(wish.options[0], "violet"), wish)
    other = Wish("address", "done", "51234", address="7 Elm Road, 12345 Halsey")
    assert not agrees("I will change the address of order 51234 to 8 Elm Road, 12345 Halsey. Yes or no?", other)
    assert not agrees("I will cancel order 51234. Yes or no?", other)


def test_the_user_insists_once_and_its_patience_ends():
    cannot = "I am sorry, that is not possible."
    insists, leaves = answer(task_of("cancel"), cannot, cannot)
    assert not insists.ends and "sure" in insists.text and leaves.ends
    assert answer(task_of("late_cancel"), cannot)[0].ends
    lost = answer(task_of("cancel"), *["Nice weather."] * 4)
    assert [one.ends for one in lost] == [False, False, False, True]


# -- what an episode is worth ----------------------------------------------------------------------


def cancelled(task, *, find=True, propose=True, order=None, user=None):
    """An agent that cancels, with the steps it leaves out."""
    goal, speech = goal_of(task), PlainSpeech()
    wish = goal.wishes[0]
    order = order or wish.order
    replies = [] if goal.told else [speech.asks("identity")]
    replies += [speech.call(("find_user", {"who": user or goal.identity}))] if find else []
    replies += [speech.asks(name) for name in FACTS["cancel"] if name not in wish.told]
    replies += [speech.proposes(wish)] if propose else []
    return [*replies, speech.call(("cancel_order", {"order": order, "reason": wish.reason})), "That has been done."]


def test_an_agent_that_asks_for_no_yes_or_does_not_know_who_asks_earns_nothing():
    task = task_of("cancel")
    assert play(task, cancelled(task)).trajectory.score.value == 1.0
    for left_out in ("find", "propose"):
        score = play(task, cancelled(task, **{left_out: False})).trajectory.score
        assert (score.value, score.parts) == (0.0, {"database": 1.0, "said": 1.0, "rules": 0.0}), left_out


def test_a_customer_found_by_what_the_user_did_not_say_is_not_identified():
    task = task_of("cancel")
    user = goal_of(task).user
    other = next(k for k in (user, database().users[user]["email"]) if k != goal_of(task).identity)
    score = play(task, cancelled(task, user=other)).trajectory.score
    assert score.value == 0.0 and score.parts["rules"] == 0.0


def test_an_agent_that_edits_the_order_of_a_stranger_earns_nothing():
    task = task_of("stranger")
    assert play(task, env().gold(task)).trajectory.score.value == 1.0
    score = play(task, cancelled(task)).trajectory.score
    assert (score.value, score.parts["database"], score.parts["rules"]) == (0.0, 0.0, 0.0)
    looks = PlainSpeech().call(("get_order", {"order": goal_of(task).wishes[0].order}))
    reading = [*env().gold(task)[:-1], looks, env().gold(task)[-1]]
    assert play(task, reading).trajectory.score.parts["rules"] == 0.0


def test_a_yes_holds_for_what_was_proposed_and_until_the_agent_speaks_again():
    task = task_of("cancel")
    replies = cancelled(task)
    late = [*replies[:-2], "Wait a moment.", *replies[-2:]]
    assert play(task, late).trajectory.score.parts["rules"] == 0.0


def test_more_than_was_asked_for_is_a_wrong_database():
    task = task_of("cancel")
    goal = goal_of(task)
    extra = PlainSpeech().call(("change_address", {"order": goal.wishes[0].order, "address": "7 Elm Road, 1 X"}))
    replies = cancelled(task)
    assert play(task, [*replies[:-2], extra, *replies[-2:]]).trajectory.score.parts["database"] == 0.0


def test_a_refusal_without_a_look_and_an_answer_among_many_numbers_earn_nothing():
    late = task_of("late_cancel")
    assert play(late, ["I cannot do that."] * 3).trajectory.score.value == 0.0
    total = task_of("total")
    gold = env().gold(total)
    assert play(total, [*gold[:-1], gold[-1] + " ".join(f" {i}.90" for i in range(20))]).trajectory.score.value == 0.0


def test_wrong_calls_are_errors_to_read_and_the_episode_goes_on():
    task = task_of("cancel")
    speech = PlainSpeech()
    wrong = [speech.call(("cancel_order", {"order": "1", "reason": "mistake"})), speech.call(("fly", {})),
             speech.call(("get_order", {})), "<tool_call>{"]  # fmt: skip
    chat = play(task, [*wrong, *cancelled(task)])
    errors = [text for role, text in chat.log if role == "tool"][:4]
    assert all(text.startswith("error: ") for text in errors) and "Traceback" not in "".join(errors)
    assert chat.trajectory.score.value == 1.0
