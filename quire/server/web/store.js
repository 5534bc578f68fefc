// Conversations in this browser: an IndexedDB of this origin. The server keeps none of them.

const NAME = "quire";
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("titles", { keyPath: "id" });  // what the list needs, without the turns
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function transact(mode, act) {
  const transaction = (await database()).transaction(["conversations", "titles"], mode);
  const result = act(transaction.objectStore("conversations"), transaction.objectStore("titles"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(result?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export function put(conversation) {
  const { id, title, updated } = conversation;
  return transact("readwrite", (conversations, titles) => {
    conversations.put(conversation);
    titles.put({ id, title, updated });
  });
}

export const get = (id) => transact("readonly", (conversations) => conversations.get(id));
export const listTitles = async () => (await transact("readonly", (_, titles) => titles.getAll())).sort((one, other) => other.updated - one.updated);
export const getAll = () => transact("readonly", (conversations) => conversations.getAll());

export function remove(id) {
  return transact("readwrite", (conversations, titles) => {
    conversations.delete(id);
    titles.delete(id);
  });
}

export function removeAll() {
  return transact("readwrite", (conversations, titles) => {
    conversations.clear();
    titles.clear();
  });
}

// Ids of the conversations in which a text occurs, in any case of letters; one at a time, so that many fit in memory.
export async function search(text) {
  const wanted = text.toLowerCase();
  const found = new Set();
  await transact("readonly", (conversations) => {
    conversations.openCursor().onsuccess = (event) => {
      const cursor = event.target.result;
      if (cursor === null) return;
      const { id, title, turns } = cursor.value;
      if ([title, ...turns.map((turn) => turn.content)].some((one) => one.toLowerCase().includes(wanted))) found.add(id);
      cursor.continue();
    };
  });
  return found;
}
