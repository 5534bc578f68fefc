// The list of conversations: search, rename, export, import, delete. Which one is open is known to the chat (talk.js).

import { byId, make, newId, plural } from "/page/dom.js";
import { fromFile, savedConversation, toFile } from "/page/saved_form.js";
import * as store from "/page/store.js";

const MOST_SHOWN = 300;
const LARGEST_FILE = 64 * 2 ** 20;
const SEARCH_PAUSE = 150;  // milliseconds after the last key
let open = null;  // what opens a conversation: (conversation) => …
let currentId = () => null;
let isWorking = true;  // false where the browser keeps nothing: private windows of some

export function startConversations(hooks) {
  ({ open, currentId } = hooks);
  let timer = null;
  byId("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, SEARCH_PAUSE);
  });
  byId("export-all").addEventListener("click", async () => download(await store.getAll(), "quire-conversations"));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("delete-all").addEventListener("click", async () => {
    if (!confirm("Delete all conversations in this browser? There is no way back; Export all keeps a copy.")) return;
    await store.removeAll();
    open(null);
    refresh();
  });
  refresh();
}

export async function load(id) {
  try {
    return (await store.get(id)) ?? null;
  } catch {
    return null;
  }
}

export async function save(conversation) {
  if (!isWorking) return;
  try {
    await store.put(savedConversation(conversation));
  } catch (error) {
    isWorking = error.name === "QuotaExceededError";
    say(`Not kept in this browser: ${error.message}`);
    return;
  }
  refresh();
}

function say(text) {
  byId("conversations-status").textContent = text;
}

export async function refresh() {
  const wanted = byId("search").value.trim();
  let titles;
  try {
    titles = await store.listTitles();
    if (wanted) {
      const found = await store.search(wanted);
      titles = titles.filter(({ id }) => found.has(id));
    }
  } catch (error) {
    isWorking = false;
    return say(`This browser keeps no conversations here: ${error.message}`);
  }
  if (byId("search").value.trim() !== wanted) return;  // typed on meanwhile
  const list = byId("conversation-list");
  list.replaceChildren(...titles.slice(0, MOST_SHOWN).map(renderTitle));
  const more = titles.length - MOST_SHOWN;
  say(wanted ? `${plural(titles.length, "conversation")} found` : more > 0 ? `and ${plural(more, "older one")}: search finds them` : "");
}

function renderTitle({ id, title, updated }) {
  const choose = make("button", { type: "button", className: "title", title: new Date(updated).toLocaleString(), dir: "auto" }, title);
  choose.addEventListener("click", async () => open(await load(id)));
  const item = make("li", { className: id === currentId() ? "current" : "" }, choose);
  if (id === currentId()) choose.setAttribute("aria-current", "true");
  const act = (text, does) => make("button", { type: "button", className: "plain", "aria-label": `${text} ${title}`, onclick: does }, text);
  item.append(make("div", { className: "actions" }, act("Rename", () => rename(item, id, title)),
    act("Export", async () => download([await load(id)], fileName(title))),
    act("Delete", async () => {
      await store.remove(id);
      if (id === currentId()) open(null);
      refresh();
      say(`Deleted: ${title}`);
    })));
  return item;
}

function rename(item, id, title) {
  const field = make("input", { value: title, maxLength: 200, "aria-label": "Title" });
  let isOver = false;
  const finish = async (isWanted) => {
    if (isOver) return;
    isOver = true;
    const found = isWanted && field.value.trim() ? await load(id) : null;
    if (found !== null) {
      const renamed = { ...found, title: field.value.trim(), isNamed: true };
      await store.put(renamed);
      dispatchEvent(new CustomEvent("renamed", { detail: renamed }));
    }
    refresh();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(true);
    else if (event.key === "Escape") {
      event.stopPropagation();
      finish(false);
    }
  });
  field.addEventListener("blur", () => finish(true));
  item.replaceChildren(field);
  field.select();
}

const fileName = (title) => `quire-${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation"}`;

function download(conversations, name) {
  const address = URL.createObjectURL(new Blob([toFile(conversations)], { type: "application/json" }));
  make("a", { href: address, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function importFile() {
  const [file] = byId("import-file").files;
  byId("import-file").value = "";
  if (file === undefined) return;
  try {
    if (file.size > LARGEST_FILE) throw new Error(`it has more than ${LARGEST_FILE / 2 ** 20} MiB`);
    let added = 0;
    const found = fromFile(await file.text());
    for (const one of found) {
      const known = await load(one.id);
      if (known !== null && known.updated === one.updated) continue;  // the same one
      await store.put(known === null ? one : { ...one, id: newId() });
      added++;
    }
    await refresh();
    say(`Imported ${plural(added, "conversation")}${added < found.length ? `; ${found.length - added} were here already` : ""}`);
  } catch (error) {
    say(`${file.name} was not imported: ${error.message}`);
  }
}
